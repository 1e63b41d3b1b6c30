"""Copies of a model that trains: by copy, pickle and torch.save, within a loop and after it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import environment, needs
from tests.run.test_own_loop import HERE

pytestmark = needs("openmpi")

SCRIPT = """
import copy, io, pickle, sys
import torch
from torch import fx, nn
from torch.utils.data import TensorDataset
from aladdin_mpi import DataParallel

algorithm, kind = sys.argv[1:]
torch.manual_seed(0)
inputs = torch.randn(64, 8)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

def own_hook(module, inputs, output):
    pass

if kind == "fx":
    model = fx.symbolic_trace(model)  # which copies its hooks itself
else:
    model[2].register_forward_hook(own_hook)
OWN = int(kind == "module")

def saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    assert b"aladdin" not in file.getvalue()
    file.seek(0)
    return torch.load(file, weights_only=False)

def pickled(module):
    written = pickle.dumps(module)
    assert b"aladdin" not in written
    return pickle.loads(written)

def hooks(module):
    return sum(
        len(held) if "_hooks" in name else name.startswith("__reduce")
        for part in module.modules()
        for name, held in vars(part).items()
    ) + sum(len(each._post_accumulate_grad_hooks or ()) for each in module.parameters())

def check(step):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    for duplicate in (copy.deepcopy, saved, pickled):
        twin = duplicate(model)
        if kind == "module":
            assert hooks(twin) == OWN, (duplicate, hooks(twin))
        for name, value in twin.state_dict().items():
            assert torch.equal(value, before[name]), (duplicate, name)
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        twin.train()
        nn.functional.mse_loss(twin(inputs), data.tensors[1]).backward()
        optimizer.step()
        assert not torch.equal(twin.state_dict()["0.weight"], before["0.weight"])
        twin.eval()
        twin(inputs)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    for p, grad in zip(model.parameters(), grads):
        assert (p.grad is None and grad is None) or torch.equal(p.grad, grad)

def train(checks, leaves):
    for number, (batch, targets) in enumerate(run.batches(data)):
        loss = nn.functional.mse_loss(model(batch), targets)
        if checks:
            check(number)
        loss.backward()
        run.step(loss)
        if leaves and number == 5:
            break

weights = []
start = copy.deepcopy(model.state_dict())
cases = [(False, False), (True, False), (False, True), (True, True)]
for number, (checks, leaves) in enumerate(cases):
    model.load_state_dict(start)
    run = DataParallel(
        model, algorithm=algorithm, epochs=2, batch_size=8, run_dir=f"run{number}", quiet=True
    )
    train(checks, leaves)
    if leaves and checks and kind == "module":
        twin = copy.deepcopy(model)  # as any use of the model, it ends the run first
        assert run.is_over
        assert all(map(torch.equal, twin.state_dict().values(), model.state_dict().values()))
        assert run.summary["samples"] < 2 * 64
    run.summary
    check(number)
    assert hooks(model) == OWN
    weights.append([value.clone() for value in model.state_dict().values()])
# The copies have changed nothing.
assert all(map(torch.equal, weights[0], weights[1]))
assert all(map(torch.equal, weights[2], weights[3]))
print("all equal")
"""


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [
        pytest.param("multistep", "module", marks=pytest.mark.long),
        ("ar-sgd", "fx"),
        pytest.param("ar-sgd", "module", marks=pytest.mark.long),
    ],
)
def test_copies_are_plain_models(tmp_path: Path, algorithm: str, kind: str) -> None:
    """They have no hooks, do not act on the run, and need nothing of this package."""
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(file), algorithm, kind],
        cwd=tmp_path,
        env=environment("openmpi", HERE),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "all equal\n", done.stdout + done.stderr
