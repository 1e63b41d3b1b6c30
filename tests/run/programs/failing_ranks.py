"""Raise an error on some ranks, close the run there, and train again in the same process.

Arguments: the algorithm; the rank that fails, ``all``, or ``fresh`` for none; the way to close the
run: ``with``, ``close`` or ``uncaught``.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

from aladdin_mpi import DataParallel

algorithm, failing, way = sys.argv[1:]
torch.manual_seed(0)
inputs = torch.randn(96, 8)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))


def train(folder: str, fails: bool, way: str) -> tuple[int, list[float]]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
    run = DataParallel(
        model, algorithm=algorithm, epochs=2, batch_size=8, run_dir=folder, quiet=True, timeout=60
    )
    rank = run.transport.rank
    if way == "with":
        with run:
            loop(run, model, fails)
    else:
        try:
            loop(run, model, fails)
        except ValueError:
            run.close()
            raise
    return rank, [round(value.sum().item(), 6) for value in model.state_dict().values()]


def loop(run: DataParallel, model: nn.Module, fails: bool) -> None:
    for number, (batch, targets) in enumerate(run.batches(data)):
        loss = nn.functional.mse_loss(model(batch), targets)
        loss.backward()
        if fails and number == 2 and failing in ("all", str(run.transport.rank)):
            raise ValueError("in the loop")
        run.step(loss)


def report(rank: int, values: list[float]) -> None:
    print(f"rank {rank} {values}", flush=True)


if failing == "fresh":
    report(*train("run", False, way))
elif way == "uncaught":
    train("failed", True, "with")
    print("after the failed run", flush=True)
else:
    try:
        train("failed", True, way)
    except Exception as error:
        print(f"caught {type(error).__name__}", flush=True)
    report(*train("run", False, way))
