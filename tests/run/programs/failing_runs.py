"""Fail a run in every way, close it, and check that the next run equals a fresh one.

Argument: the algorithm.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import Dataset, TensorDataset

from aladdin_mpi import DataParallel
from aladdin_mpi.errors import UserError

UNPATCHED = GradScaler.scale
algorithm = sys.argv[1]
torch.manual_seed(0)
inputs = torch.randn(64, 8)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))


def new_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))


class Unreadable(Dataset[tuple[Tensor, ...]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if torch.is_grad_enabled() and fails_now:
            raise OSError("a sample cannot be read")
        return data[index]


class Unmovable(nn.Linear):
    def to(self, *args: Any, **settings: Any) -> Any:
        raise MemoryError("the model does not fit")


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError("backward fails")


def evaluate(module: nn.Module) -> dict[str, float]:
    raise ZeroDivisionError("at the end")


def make(model: nn.Module, **settings: Any) -> DataParallel:
    return DataParallel(
        model,
        algorithm=algorithm,
        epochs=2,
        batch_size=8,
        run_dir="run",
        overwrite=True,
        quiet=True,
        **settings,
    )


def loop(run: DataParallel, model: nn.Sequential, fault: str | None = None) -> None:
    global fails_now
    for number, (batch, targets) in enumerate(run.batches(Unreadable())):
        is_last = number == 3
        hidden = model[0](batch)
        if is_last and fault == "backward":
            hidden = Failing.apply(hidden)
        model(batch)
        loss = nn.functional.mse_loss(model[1:](hidden), targets)
        if is_last and fault == "forward":
            model(batch[:, :3])
        loss.backward()
        if is_last and fault == "after backward":
            raise ValueError("in the loop")
        if is_last and fault == "algorithm":
            model[0].weight.grad = torch.zeros(16, 8)
        if is_last and fault == "data":
            fails_now = True  # until the loop fails: a thread may have loaded the next batch
        if is_last and fault == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        run.step(loss)


def fail(model: nn.Sequential, fault: str, way: str) -> None:
    global run
    settings = {"eval_every": 0, "evaluate": evaluate} if fault == "evaluate" else {}
    run = make(Unmovable(8, 1) if fault == "constructor" else model, **settings)
    if way == "with":
        with run:
            loop(run, model, fault)
    else:
        loop(run, model, fault)


def train() -> list[Tensor]:
    model = new_model()
    loop(make(model), model)
    return [value.clone() for value in model.state_dict().values()]


def leftovers(model: nn.Module) -> list[int]:
    hooks = sum(len(h) for m in model.modules() for n, h in vars(m).items() if "_hooks" in n)
    on_parameters = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
    frozen = sum(not p.requires_grad for p in model.parameters())
    threads = sum(thread.name == "mpi-progress" for thread in threading.enumerate())
    patched = int(GradScaler.scale is not UNPATCHED)
    of_optimizers = len(torch_optimizer._global_optimizer_pre_hooks)
    is_locked = int(os.path.exists("run/.lock"))
    return [hooks, on_parameters, frozen, threads, patched, of_optimizers, is_locked]


fails_now = False
run: DataParallel | None = None
first = train()
FAULTS = [
    *("forward", "backward", "after backward", "algorithm", "data", "interrupt", "evaluate"),
    "constructor",
]
WAYS = ["close", "with", "a second run"]
for place, fault in enumerate(FAULTS):
    for way in WAYS if fault == "after backward" else [WAYS[place % 3]]:
        run, model = None, new_model()
        try:
            fail(model, fault, way)
        except (Exception, KeyboardInterrupt) as error:
            kind = type(error).__name__
        fails_now = False
        if way == "close" and run is not None:
            run.close()
        if way != "a second run":
            assert leftovers(model) == [0] * 7, (fault, way, leftovers(model))
        assert all(map(torch.equal, first, train())), (fault, way)
        assert leftovers(model) == [0] * 7, (fault, way, leftovers(model))
        if run is not None:
            run.close()
            assert run.is_over
            closed = run
            uses: list[Callable[[], object]] = [
                closed.step,
                lambda closed=closed: closed.summary,
                lambda closed=closed: closed.lr,
            ]
            for use in uses:
                try:
                    use()
                except UserError as error:
                    assert "closed" in str(error) and "run.close()" in str(error), error
                else:
                    raise AssertionError("a closed run was used")
    print(fault, kind)
