"""An optimizer of one's own in a training loop over MPI."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.commands import metrics, summary
from tests.launch import Completed, needs
from tests.run.test_own_loop import run_script

pytestmark = needs("openmpi")

SCRIPT = """
import torch
from torch.utils.data import TensorDataset
from aladdin_mpi import DataParallel
from tests.run.test_own_optimizer import CASES, NUMBERS, groups, loss_of, network, one_cycle

for name, (algorithm, make, body, settings) in CASES.items():
    if name not in WANTED:
        continue
    model = network()
    optimizer = eval(make)
    scheduler = one_cycle(optimizer)
    settings = {"samples": 168, "run_dir": name, **settings}
    run = DataParallel(
        model, optimizer=optimizer, scheduler=scheduler, algorithm=algorithm, batch_size=4,
        bucket_mb=0.0002, seed=3, quiet=True, log_every=8, **settings
    )
    mine = []
    for (numbers,) in run.batches(TensorDataset(NUMBERS)):
        mine.append(numbers.clone())
        loss = loss_of(model, numbers)
        loss.backward()
        exec(body)
        run.step(loss)
    torch.save({"batches": mine, "model": model.state_dict()}, f"{name}-{RANK}.pt")
"""
NUMBERS = torch.randn(64, 6, generator=torch.Generator().manual_seed(5))


def network() -> nn.Sequential:
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))


def groups(model: nn.Module) -> list[dict[str, object]]:
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]


def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.OneCycleLR:
    return torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.02, total_steps=80, cycle_momentum=False
    )


def loss_of(model: nn.Module, numbers: torch.Tensor) -> torch.Tensor:
    return (model(numbers) - numbers.flip(1)).square().mean() * 10


ADAMW = "torch.optim.AdamW(groups(model), lr=0.01)"


METHOD = "run.clip_grad_norm_(0.5)"
ADAFACTOR = "torch.optim.Adafactor(groups(model), lr=0.01)"
Case = tuple[str, str, str, dict[str, object]]
AS_TORCH: dict[str, Case] = {
    "ar-sgd": ("ar-sgd", ADAMW, "", {}),
    "ar-sgd, clip": ("ar-sgd", ADAMW, "", {"clip": 0.5}),
    "ar-sgd, clip_grad_norm_": ("ar-sgd", ADAMW, METHOD, {}),
    "ar-sgd, whole parameters": ("ar-sgd", ADAFACTOR, "", {}),
    "bsp": ("bsp", ADAMW, "", {}),
    "bsp, clip_grad_norm_": ("bsp", ADAMW, METHOD, {}),
}
CLIPPED = {"ar-sgd, clip": "mean", "ar-sgd, clip_grad_norm_": "mean", "bsp, clip_grad_norm_": "own"}
LEARN: dict[str, Case] = {
    algorithm: (algorithm, ADAMW, "", {"samples": 304})
    for algorithm in ("aladdin", "aladdin-ahead", "asp", "osgp", "easgd")
}
LEARN["aladdin-ahead, clip"] = ("aladdin-ahead", ADAMW, "", {"samples": 304, "clip": 0.5})
GO_ON: dict[str, Case] = {
    f"{algorithm}, {name}": (algorithm, ADAMW, "", {"run_dir": run, "samples": n, **more})
    for algorithm in ("ar-sgd", "bsp")
    for name, run, n, more in (
        ("half", f"{algorithm}, on", 48, {}),
        ("other half", f"{algorithm}, on", 96, {"resume": f"{algorithm}, on"}),
        ("straight", f"{algorithm}, straight", 96, {}),
    )
}
REFUSED: dict[str, Case] = {
    "in the middle": ("aladdin", ADAMW, f"{METHOD} if len(mine) > 3 else None", {}),
    "parts": ("aladdin-ahead", ADAMW, METHOD, {}),
    "stepped": ("ar-sgd", ADAMW, "scheduler.step()", {}),
    "multistep": ("multistep", ADAMW, "", {}),
    "rate": ("ar-sgd", ADAMW, "", {"lr": 0.1}),
    "server": ("asp", ADAMW, "", {"asp": {"momentum": "server"}}),
    "ranks differ": ("bsp", "torch.optim.Adam(model.parameters(), weight_decay=RANK // 2)", "", {}),
}
CASES = {**AS_TORCH, **LEARN, **GO_ON, **REFUSED}


def train(folder: Path, names: list[str], check: bool = True) -> Completed:
    """One job for several runs, since every rank takes seconds to import what torch.optim needs."""
    head = f"import os\nWANTED = {names}\nRANK = int(os.environ['OMPI_COMM_WORLD_RANK'])\n"
    return run_script(folder, head + SCRIPT, check=check, timeout=150)


def reference(stored: list[list[torch.Tensor]], make: str, clip: str) -> nn.Module:
    """The same batches in one process: the mean of all workers' gradients, then torch's step."""
    model = network()
    optimizer = eval(make, {"torch": torch, "model": model, "groups": groups})
    scheduler = one_cycle(optimizer)
    for batches in zip(*stored, strict=True):
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for numbers in batches:
            model.zero_grad()
            loss_of(model, numbers).backward()
            if clip == "own":
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            for total, p in zip(sums, model.parameters(), strict=True):
                assert p.grad is not None
                total += p.grad / len(batches)
        for total, p in zip(sums, model.parameters(), strict=True):
            p.grad = total
        if clip == "mean":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        for _ in batches:
            scheduler.step()
    return model


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, values in one.items():
        torch.testing.assert_close(values, other[name], rtol=1e-4, atol=1e-5)


def steps_as_torch_does(folder: Path, name: str) -> None:
    """With groups, a scheduler, and the norm of the mean or of each worker's own gradient."""
    algorithm, make, _, _ = CASES[name]
    found = [torch.load(folder / f"{name}-{rank}.pt") for rank in range(3)]
    workers = found if algorithm == "ar-sgd" else found[1:]
    batches = [each["batches"] for each in workers]
    expected = reference(batches, make, CLIPPED.get(name, ""))
    for each in found:
        same(expected.state_dict(), each["model"])
    rates = [line["lr"] for line in metrics(folder / name, "train")]
    assert max(rates) > 2 * rates[0] > 0  # the scheduler's, told by a worker


def learns(folder: Path, name: str) -> None:
    found = summary(folder / name)
    assert found["gradients_applied"] == found["gradients_computed"]
    model = network()
    before = loss_of(model, NUMBERS).item()
    model.load_state_dict(torch.load(folder / f"{name}-0.pt")["model"])
    assert loss_of(model, NUMBERS).item() < 0.9 * before


def goes_on(folder: Path, algorithm: str) -> None:
    """Half a run and its second half are the whole one; the scheduler goes on too."""
    for rank in range(3):
        halves, straight = (
            torch.load(folder / f"{algorithm}, {name}-{rank}.pt")["model"]
            for name in ("other half", "straight")
        )
        same(halves, straight)


def test_optimizers_of_ones_own(tmp_path: Path) -> None:
    """Synchronous algorithms step as torch does; others learn; runs go on where they were."""
    train(tmp_path, [*AS_TORCH, *LEARN, *GO_ON])
    for name in AS_TORCH:
        steps_as_torch_does(tmp_path, name)
    for name in LEARN:
        learns(tmp_path, name)
    for algorithm in ("ar-sgd", "bsp"):
        goes_on(tmp_path, algorithm)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("in the middle", "expected run.clip_grad_norm_() in the first step too"),
        pytest.param("parts", "give clip= to DataParallel instead", marks=pytest.mark.long),
        pytest.param("stepped", "scheduler.step() was called", marks=pytest.mark.long),
        pytest.param("multistep", "expected momentum SGD for multistep", marks=pytest.mark.long),
        pytest.param("rate", "lr: expected without optimizer, got both", marks=pytest.mark.long),
        pytest.param("server", "asp={'momentum': ...}: expected worker", marks=pytest.mark.long),
        pytest.param(
            "ranks differ", "optimizer.groups: Adam: 4 parameters, lr 0.0", marks=pytest.mark.long
        ),
    ],
)
def test_what_cannot_work_is_refused_by_name(tmp_path: Path, name: str, words: str) -> None:
    done = train(tmp_path, [name], check=False)
    assert done.returncode != 0
    assert words in done.stderr
