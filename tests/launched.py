"""Functions that ``aladdin_mpi.launch`` calls on its ranks in tests."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aladdin_mpi import DataParallel


def train(folder: Path, **settings: Any) -> tuple[int, int, list[float]]:
    """Train; return this worker's number, the number of workers, and the losses of the epochs."""
    torch.manual_seed(0)
    inputs = torch.randn(96, 4)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = nn.Linear(4, 1)
    run = DataParallel(model, epochs=3, batch_size=8, run_dir=folder, quiet=True, **settings)
    losses = []
    for epoch in run.epochs(data):
        total = 0.0
        for x, y in epoch:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            run.step(loss)
            total += loss.item() * len(x)
        losses.append(run.reduce(total, "sum").item() / 96)
        run.print(f"epoch {epoch}")
    return run.worker, run.workers, losses


def fail(rank: int) -> None:
    """Raise an error on one rank; the others wait."""
    print("before the error", flush=True)
    if int(os.environ["OMPI_COMM_WORLD_RANK"]) == rank:
        raise ArithmeticError("of this rank alone")
    time.sleep(60)


def sleep(mark: str) -> None:
    """Wait for longer than any test."""
    print("asleep", flush=True)
    time.sleep(100)


def leave() -> None:
    """End the process without an error."""
    raise SystemExit(0)
