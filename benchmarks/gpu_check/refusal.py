"""Check that gradients that are not finite are rejected, with the same result as on the CPU.

Runs under mpirun; the argument is a folder for the runs.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import Subset

from aladdin_mpi import load_dataset
from benchmarks.gpu_check import rows
from benchmarks.gpu_check.device import is_test_device
from benchmarks.gpu_check.training import WORLD, make, network

PART = "recovery"
REFUSED = ("ar-sgd", "bsp")
REFUSED_STEPS = (1, 2)
"""Steps in which the first worker's gradient is not finite."""
TOLERANCE = 1e-3
"""Largest difference between a GPU and the CPU, relative to the largest parameter."""


def train_with_refused(
    folder: str, device: str, name: str, **options: Any
) -> tuple[dict[str, torch.Tensor], int]:
    """Train with NaN in the first worker's images; return the state and rank 0's refusals."""
    module = network()
    module.insert(1, nn.BatchNorm2d(4))
    run = make(module, folder, device, name, **options)
    few: Any = Subset(cast(Any, load_dataset("digits").train), range(480))
    for number, (images, labels) in enumerate(run.batches(few)):
        if number in REFUSED_STEPS and run.is_first:
            images[0] = torch.nan
        loss = nn.functional.cross_entropy(module(images), labels)
        loss.backward()
        run.step(loss)
    state = {key: value.cpu() for key, value in module.state_dict().items()}
    return state, run.summary["gradients_refused"] if WORLD.rank == 0 else 0


def check_refused(folder: str, name: str) -> None:
    """Train with gradients that are not finite, and compare with the CPU."""
    expected, _ = train_with_refused(folder, "cpu", name)
    result, refused = train_with_refused(folder, "gpu", name)
    finite = all(bool(value.isfinite().all()) for value in result.values())
    largest = max(float(value.abs().max()) for value in expected.values())
    error = max(float((result[key] - expected[key]).abs().max()) for key in expected) / largest
    if WORLD.rank == 0:
        bound = 0.0 if is_test_device() else TOLERANCE
        passed = finite and refused == len(REFUSED_STEPS) and error <= bound
        figures = f"{refused} gradients refused, difference from the CPU {error:.1e}"
        note = "" if finite else "not finite"
        rows.report(PART, f"{name}: NaN", passed, figures, note)


def main() -> None:
    """Check every case."""
    folder = sys.argv[1]
    if not is_test_device():
        torch.backends.cudnn.deterministic = True
    for name in REFUSED:
        check_refused(folder, name)


if __name__ == "__main__":
    main()
