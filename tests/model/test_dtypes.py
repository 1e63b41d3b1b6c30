"""Models in other dtypes than float32, and in several."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.commands import simulate, summary
from tests.launch import needs, run_ranks
from tests.run.test_own_loop import HERE

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
from aladdin_mpi import DataParallel

folder, algorithm, *names = sys.argv[1:]
kinds = [getattr(torch, name) for name in names]
torch.manual_seed(1)
inputs = torch.randn(64, 3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 8).to(kinds[0])
        self.norm = nn.LayerNorm(8).to(kinds[-1])
        self.last = nn.Linear(8, 1).to(kinds[0])

    def forward(self, x):
        x = self.norm(self.first(x.to(kinds[0])).to(kinds[-1])).tanh()
        return self.last(x.to(kinds[0])).float()


model = Net()
run = DataParallel(
    model, algorithm=algorithm, samples=1600, batch_size=4, lr=0.02, run_dir=folder, quiet=True,
    wire="fp32" if torch.float64 in kinds else "auto",
)
for (batch,) in run.batches(TensorDataset(inputs)):
    loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
    loss.backward()
    run.step(loss)
loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().item()
run.print(f"loss {loss:.6f}")
"""


def check(folder: Path, printed: str, kinds: list[str], most: float = 0.1) -> None:
    assert float(printed.split("loss")[1]) < most
    found = summary(folder)
    assert found["gradients_applied"] == found["gradients_computed"]
    saved = torch.load(folder / "model.pt")
    expected = {getattr(torch, kind) for kind in kinds}
    assert {value.dtype for value in saved.values()} == expected


@pytest.mark.parametrize(
    ("algorithm", "kinds"),
    [
        ("aladdin-ahead", ["float64"]),
        ("aladdin-ahead", ["bfloat16", "float32"]),
        pytest.param("bsp", ["float32", "float64"], marks=pytest.mark.long),
        pytest.param("sgp", ["bfloat16", "float32"], marks=pytest.mark.long),
    ],
)
def test_they_train(tmp_path: Path, algorithm: str, kinds: list[str]) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ("--workers", "3", "--", tmp_path / "run", algorithm, *kinds)
    done = simulate(None, tmp_path / "script.py", *words)
    # A fixed wire leaves aladdin-ahead fewer choices.
    check(tmp_path / "run", done.stdout, kinds, most=0.2 if "float64" in kinds else 0.1)


@needs("openmpi")
def test_several_over_mpi(tmp_path: Path) -> None:
    kinds = ["bfloat16", "float32"]
    (tmp_path / "script.py").write_text(SCRIPT)
    run = partial(run_ranks, env=HERE, cwd=tmp_path, timeout=120)
    done = run(3, ["script.py", "run", "bsp", *kinds])
    check(tmp_path / "run", done.stdout, kinds)
    done = run(2, ["script.py", "other", "multistep", *kinds], check=False)
    assert done.stderr.count("expected trainable parameters of one dtype for multistep") == 1
