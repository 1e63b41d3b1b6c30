"""Make the mistake named by the argument before the first step of a custom loop."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from aladdin_mpi import DataParallel

data = TensorDataset(torch.randn(64, 3), torch.zeros(64))
model = nn.Linear(3, 1)


def make(**settings: Any) -> DataParallel:
    return DataParallel(model, samples=64, run_dir="run", quiet=True, **settings)


def second_run() -> None:
    DataParallel(model, samples=64)
    DataParallel(nn.Linear(2, 1), samples=8)


not_a_module: Any = "resnet20"
not_a_function: Any = 5
MISTAKES: dict[str, Callable[[], object]] = {
    "unknown option": lambda: DataParallel(model, epoch=5),
    "option of an algorithm": lambda: DataParallel(model, aladdin_pi=2),
    "unknown option of an algorithm": lambda: DataParallel(model, aladdin={"pii": 2}),
    "built-in training only": lambda: DataParallel(model, precision="bf16"),
    "compression without servers": lambda: DataParallel(
        model, algorithm="gosgd", compression="dgc"
    ),
    "second run": second_run,
    "optimizer": lambda: DataParallel(model, optimizer="adamv"),
    "module": lambda: DataParallel(not_a_module),
    "evaluate": lambda: DataParallel(model, evaluate=not_a_function),
    "batch size": lambda: list(make(batch_size=4).batches(DataLoader(data, 8))),
    "iterator": lambda: list(make().batches(iter(data))),
    "data": lambda: list(make().batches(64)),
}
MISTAKES[sys.argv[1]]()
