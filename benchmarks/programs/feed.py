"""Run a training loop whose steps and batch loading sleep, as if a device computed.

Rank 0 is the server. The last line that it prints is a JSON list, with one record for every
measurement: the median seconds of a step on the slowest worker.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from statistics import median
from typing import Any

from mpi4py import MPI

# isort: split
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from aladdin_mpi.run.data_parallel import DataParallel

BATCH = 16
WARM_UP = 6
"""Warm-up steps: a step waits while the first three batches are loaded."""


class Slow(Dataset[Any]):
    """A data set whose batches take a given number of seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.seconds / BATCH)
        return torch.full((8,), float(index)), index % 2


def run(folder: str, processes: int, args: argparse.Namespace) -> float:
    """Return the seconds of a step of one run with this number of loader processes."""
    data: Any = Slow(args.loading)
    if processes:
        data = DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=processes)
    workers = MPI.COMM_WORLD.size - 1
    training = DataParallel(
        nn.Linear(8, 2),
        algorithm="aladdin",
        samples=BATCH * (WARM_UP + args.steps) * workers,
        batch_size=BATCH,
        run_dir=folder,
        quiet=True,
        overwrite=True,
    )
    seconds, last = [], time.perf_counter()
    for inputs, labels in training.batches(data):
        nn.functional.cross_entropy(training.module(inputs), labels).backward()
        time.sleep(args.step)
        training.step()
        now = time.perf_counter()
        seconds.append(now - last)
        last = now
    mine = 0.0 if training.is_server else median(seconds[WARM_UP:])
    return MPI.COMM_WORLD.allreduce(mine, MPI.MAX)


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", required=True)
    parser.add_argument("--step", type=float, required=True)
    parser.add_argument("--loading", type=float, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    args = parser.parse_args()
    folder = MPI.COMM_WORLD.bcast(tempfile.mkdtemp() if MPI.COMM_WORLD.rank == 0 else None)
    records = [
        {"processes": processes, "seconds": run(folder, processes, args)}
        for _ in range(args.repeats)
        for processes in args.processes
    ]
    if MPI.COMM_WORLD.rank == 0:
        shutil.rmtree(folder)
        print(json.dumps(records), flush=True)


if __name__ == "__main__":
    main()
