"""Half precision: a loss scale that all workers share, and that nobody sees in the gradients."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aladdin_mpi.control.refusals import FIRST
from tests.commands import summary, train
from tests.launch import ROOT, needs, run_ranks

pytestmark = needs("openmpi")

BOTH = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
from aladdin_mpi import DataParallel

algorithm, settings = sys.argv[1], eval(sys.argv[2])
generator = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(64, 20, generator=generator), torch.arange(64) % 3)
results = []
for is_scaled in (False, True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 3))
    run = DataParallel(
        model, algorithm=algorithm, samples=256, batch_size=8, lr=0.1, quiet=True,
        run_dir=f"{sys.argv[3]}/{is_scaled}", **settings,
    )
    for inputs, labels in run.batches(data):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        (run.scale(loss) if is_scaled else loss).backward()
        run.step(loss)
    results.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
assert torch.equal(*results), (results[0] - results[1]).abs().max()
print("equal", flush=True)
"""
OVERFLOW = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
from aladdin_mpi import DataParallel

data = TensorDataset(torch.randn(64, 20), torch.arange(64) % 3)
torch.manual_seed(0)
model = nn.Linear(20, 3)
run = DataParallel(
    model, algorithm="ar-sgd", samples=256, batch_size=8, lr=0.1, quiet=True, run_dir=sys.argv[1],
)
scales = []
for number, (inputs, labels) in enumerate(run.batches(data)):
    loss = nn.functional.cross_entropy(model(inputs), labels)
    with torch.no_grad():
        scales.append(int((run.scale(loss) / loss).log2().round()))
    overflows = number in (3, 4) and run.is_first
    (run.scale(loss) * (1e37 if overflows else 1.0)).backward()
    run.step(loss)
assert all(bool(p.isfinite().all()) for p in model.parameters())
print("exponents", *scales, flush=True)
"""


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("ar-sgd", {}),
        pytest.param("ar-sgd", {"clip": 0.1, "accumulate": 2}, marks=pytest.mark.long),
        pytest.param("bsp", {"wait_free": False}, marks=pytest.mark.long),
        ("multistep", {"multistep": {"exchange": "activations"}}),
    ],
)
def test_it_is_taken_off_again(tmp_path: Path, algorithm: str, settings: dict[str, object]) -> None:
    """A power of two: in fp32, to the bit."""
    words = [script(tmp_path, BOTH), algorithm, repr(settings), str(tmp_path)]
    done = run_ranks(3, words, env={"PYTHONPATH": str(ROOT)})
    assert done.stdout.count("equal") == 3


def test_a_gradient_that_overflows_is_left_out_and_the_scale_halved_for_all(
    tmp_path: Path,
) -> None:
    words = [script(tmp_path, OVERFLOW), str(tmp_path / "run")]
    done = run_ranks(2, words, env={"PYTHONPATH": str(ROOT)})
    first, second = re.findall(r"exponents ([\d ]+)", done.stdout)
    assert first == second  # the workers of a round have the same
    exponents = list(map(int, first.split()))
    assert exponents == sorted(exponents, reverse=True)
    assert exponents[0] == FIRST and exponents[-1] == FIRST - 1 - (exponents.count(FIRST) == 4)
    assert summary(tmp_path / "run")["gradients_refused"] == 2
    told = re.findall(r"worker 0 .*: a gradient overflows float16 .* is now (\d+)", done.stderr)
    assert told and int(told[0]) == 2 ** (FIRST - 1)
    assert "gradient refused" not in done.stderr


def test_in_float16_a_model_learns(tmp_path: Path) -> None:
    train(3, tmp_path / "run", "--precision", "fp16", "--epochs", 2)
    assert summary(tmp_path / "run")["test_accuracy"] > 0.9
