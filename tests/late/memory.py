"""What a run takes of a device's memory and of pinned memory, in multiples of the model.

    PYTHONPATH=. .venv/bin/mpirun -np 3 .venv/bin/python -m tests.late.memory

Of the worker that takes most, after six steps, without what backward and the loss take for
themselves.
"""

from __future__ import annotations

import gc
import tempfile
from typing import Any

from mpi4py import MPI

# isort: split
import torch
from torch import nn
from torch.utils.data import TensorDataset

from aladdin_mpi import DataParallel
from tests.late.device import runtime

WORLD = MPI.COMM_WORLD
WIDTH = 1000
CASES = (
    "aladdin-ahead int8",
    "aladdin-ahead fp32",
    "aladdin fp32",
    "bsp fp32",
    "bsp bf16",
    "bsp int8",
    "bsp dgc",
    "bsp node-sums",
    "asp fp32",
    "ssp fp32",
    "easgd fp32",
    "ar-sgd fp32",
    "ar-sgd bf16",
    "ar-sgd dgc",
    "multistep fp32",
    "sgp fp32",
    "gosgd fp32",
    "ad-psgd fp32",
    "local-sgd fp32",
    "adsp fp32",
)
OPTIONS: dict[str, dict[str, Any]] = {
    "dgc": {"compression": "dgc"},
    "node-sums": {"node_sums": True},
}
"""What is no format of the wire."""


def network() -> nn.Module:
    """Three million parameters: buffers are as large as those of real models are."""
    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


def measure(folder: str, case: str) -> tuple[float, float]:
    """Of the device's memory and of pinned memory."""
    algorithm, how = case.split()
    settings = OPTIONS.get(how, {"wire": how})
    before = runtime.memory_used()
    module = network()
    nbytes = sum(4 * p.numel() for p in module.parameters())
    run = DataParallel(
        module,
        algorithm=algorithm,
        device="gpu",
        samples=4 * 8 * WORLD.size,
        batch_size=4,
        lr=0.001,
        bucket_mb=1.0,
        run_dir=folder,
        quiet=True,
        overwrite=True,
        **settings,
    )
    data = TensorDataset(torch.randn(64, WIDTH), torch.zeros(64, dtype=torch.long))
    now = before
    for number, (inputs, labels) in enumerate(run.batches(data)):
        nn.functional.cross_entropy(module(inputs), labels).backward()
        run.step()
        if number == 5:
            now = runtime.memory_used()
    return (now[0] - before[0]) / nbytes, (now[2] - before[2]) / nbytes


def main() -> None:
    """Print the table."""
    runtime.set_delays(200, 0, WORLD.rank)
    folder = WORLD.bcast(tempfile.mkdtemp() if WORLD.rank == 0 else None)
    for case in CASES:
        device, pinned = (WORLD.allreduce(each, MPI.MAX) for each in measure(folder, case))
        gc.collect()
        if WORLD.rank == 0:
            print(f"| {case} | {device:.1f} | {pinned:.1f} |", flush=True)


main()
