"""Train with one loader process per rank and print the start method of the processes.

Arguments: the run's folder, the start method, and ``function`` or ``lambda``, the kind of collate
function.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from typing import Any

import torch
from mpi4py import MPI
from torch import nn
from torch.utils.data import DataLoader, Dataset

from aladdin_mpi import DataParallel


class Samples(Dataset[Any]):
    """Samples that contain the class of the process that loads them."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, str]:
        started = type(multiprocessing.current_process()).__name__
        if started in ("ForkServerProcess", "SpawnProcess"):
            assert not MPI.Is_initialized()
        return torch.full((3,), float(index)), index % 2, started


def put_together(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor, str]:
    images, labels, started = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(labels), started[0]


COLLATE: dict[str, Callable[[list[Any]], Any]] = {
    "function": put_together,
    "lambda": lambda samples: put_together(samples),
}


def main(run_dir: str, method: str, collate: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    run = DataParallel(
        model,
        algorithm="ar-sgd",
        epochs=1,
        lr=0.01,
        run_dir=run_dir,
        quiet=True,
        loader_start_method=method,
    )
    loader = DataLoader(Samples(), batch_size=8, num_workers=1, collate_fn=COLLATE[collate])
    kinds = set()
    for images, labels, started in run.batches(loader):
        kinds.add(started)
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        run.step(loss)
    run.print("started by", *sorted(kinds))


if __name__ == "__main__":
    main(*sys.argv[1:])
