"""Copy a model in every way during and after training; arguments: algorithm, kind of model."""

from __future__ import annotations

import copy
import io
import pickle
import sys

import torch
from torch import Tensor, fx, nn
from torch.utils.data import TensorDataset

from aladdin_mpi import DataParallel

algorithm, kind = sys.argv[1:]
torch.manual_seed(0)
inputs = torch.randn(64, 8)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sequence = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
model: nn.Module = sequence


def own_hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    """Do nothing."""


if kind == "fx":
    model = fx.symbolic_trace(sequence)  # which itself copies its hooks
else:
    sequence[2].register_forward_hook(own_hook)
OWN = int(kind == "module")


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    assert b"aladdin" not in file.getvalue()
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def pickled(module: nn.Module) -> nn.Module:
    written = pickle.dumps(module)
    assert b"aladdin" not in written
    loaded: nn.Module = pickle.loads(written)
    return loaded


def hooks(module: nn.Module) -> int:
    return sum(
        len(held) if "_hooks" in name else name.startswith("__reduce")
        for part in module.modules()
        for name, held in vars(part).items()
    ) + sum(len(each._post_accumulate_grad_hooks or ()) for each in module.parameters())


def check() -> None:
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
    for p, grad in zip(model.parameters(), grads, strict=True):
        if p.grad is None or grad is None:
            assert p.grad is grad is None
        else:
            assert torch.equal(p.grad, grad)


def train(checks: bool, leaves: bool) -> None:
    for number, (batch, targets) in enumerate(run.batches(data)):
        loss = nn.functional.mse_loss(model(batch), targets)
        if checks:
            check()
        loss.backward()
        run.step(loss)
        if leaves and number == 5:
            break


weights = []
start = copy.deepcopy(model.state_dict())
cases = [(False, False), (True, False), (False, True), (True, True)]
for case, (checks, leaves) in enumerate(cases):
    model.load_state_dict(start)
    run = DataParallel(
        model, algorithm=algorithm, epochs=2, batch_size=8, run_dir=f"run{case}", quiet=True
    )
    train(checks, leaves)
    if leaves and checks and kind == "module":
        twin = copy.deepcopy(model)  # like any use of the model, it ends the run first
        assert run.is_over
        assert all(map(torch.equal, twin.state_dict().values(), model.state_dict().values()))
        assert run.summary["samples"] < 2 * 64
    assert run.summary  # which ends the run
    check()
    assert hooks(model) == OWN
    weights.append([value.clone() for value in model.state_dict().values()])
# The copies have not affected the model.
assert all(map(torch.equal, weights[0], weights[1]))
assert all(map(torch.equal, weights[2], weights[3]))
print("all equal")
