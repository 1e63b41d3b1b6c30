"""State that training changes itself: buffers, and frozen parameters such as a teacher's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from aladdin_mpi.options.algorithms import ALGORITHMS
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.run.data_parallel import DataParallel
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from tests.launch import needs
from tests.run.program_runs import run_script

DATA = TensorDataset(torch.randn(48, 3, generator=torch.Generator().manual_seed(0)))
BATCH, EPOCHS, WORKERS = 4, 2, 2


class Model(nn.Module):
    """It counts its training passes, in a buffer that grows too, and caches a constant."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.teacher = nn.Linear(3, 1), nn.Linear(3, 1)
        self.teacher.requires_grad_(False)
        self.count: Tensor
        self.counts: Tensor
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("counts", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "one"):
            self.register_buffer("one", torch.ones(()), persistent=False)
        if self.training:
            self.count = self.count + 1
            self.counts = torch.cat([self.counts, self.count.view(1)])
        y: Tensor = self.layer(x) * self.one
        return y

    def move_teacher(self) -> None:
        """Let the teacher follow, as MoCo does."""
        for mine, theirs in zip(self.teacher.parameters(), self.layer.parameters(), strict=True):
            mine.data = mine.data * 0.5 + theirs.data * 0.5


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def train(
    folder: Path, algorithm: str, seen: list[dict[str, Tensor]], **settings: Any
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Return the models of all ranks, and that of the first worker after its last step."""
    models: dict[int, dict[str, Tensor]] = {}
    last: dict[str, Tensor] = {}
    servers = int(ALGORITHMS[algorithm].has_servers)

    def evaluate(module: nn.Module) -> dict[str, float]:
        seen.append(state(module))
        return {"test_loss": 1.0}

    def main(transport: Transport) -> None:
        model = Model()
        options: dict[str, Any] = {"epochs": EPOCHS, "batch_size": BATCH, "lr": 0.01}
        options |= {
            "compute_time": 0.01,
            "run_dir": folder,
            "resume": "auto",
            "quiet": True,
            **settings,
        }
        run = DataParallel(
            model, transport=transport, algorithm=algorithm, evaluate=evaluate, **options
        )
        for (x,) in run.batches(DATA):
            loss = model(x).square().mean()
            loss.backward()
            run.step(loss)
            model.move_teacher()
            if run.is_first:
                last.update(state(model))
        models[transport.rank] = state(model)

    VirtualCluster(servers + WORKERS, Cluster(hosts=2), 0).run(main)
    return [models[rank] for rank in sorted(models)], last


OWN = ("count", "counts", "teacher.weight", "teacher.bias")


@pytest.mark.parametrize("algorithm", ["ar-sgd", "bsp", "aladdin-ahead"])
def test_all_ranks_have_the_state_that_the_first_worker_has_changed(
    tmp_path: Path, algorithm: str
) -> None:
    """The evaluated model and the file too."""
    seen: list[dict[str, Tensor]] = []
    models, last = train(tmp_path, algorithm, seen)
    assert int(last["count"]) == len(last["counts"]) > 0
    start = Model().teacher.weight
    assert not torch.allclose(last["teacher.weight"], start, atol=1e-3)
    for each in (*models, seen[-1], torch.load(tmp_path / "model.pt")):
        for name in OWN:
            assert torch.equal(each[name], last[name]), name
    assert {*models[0]} == {*last}  # without the cache
    if algorithm == "ar-sgd":
        assert 0 < seen[0]["count"] < seen[-1]["count"] == 12


def test_buffers_continue_in_a_resumed_run(tmp_path: Path) -> None:
    train(tmp_path, "bsp", [], epochs=1)
    _, last = train(tmp_path, "bsp", [], epochs=2)
    assert last["counts"].tolist() == list(range(1, 13))


@needs("openmpi")
def test_servers_receive_the_state_over_mpi(tmp_path: Path) -> None:
    script = f"""
import torch
from aladdin_mpi import DataParallel
from {__name__} import DATA, Model

model = Model()
run = DataParallel(model, algorithm="bsp", epochs=1, batch_size=4, run_dir="run", quiet=True)
for (x,) in run.batches(DATA):
    loss = model(x).square().mean()
    loss.backward()
    run.step(loss)
    model.move_teacher()
print("counts", model.counts.tolist(), float(model.teacher.weight.sum()), flush=True)
"""
    printed = run_script(tmp_path, script).stdout.splitlines()
    lines = [line for line in printed if line.startswith("counts")]
    assert len(lines) == 3 and len(set(lines)) == 1
    assert lines[0].startswith("counts [1.0, 2.0, 3.0, 4.0, 5.0, 6.0] ")
