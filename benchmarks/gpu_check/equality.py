"""Results on the accelerator against results on the CPU, by algorithm and wire format.

Runs under mpirun; the argument is a folder for the runs. On the delayed-copy test device results
are bit-identical to the CPU's. On a GPU kernels sum in another order: a result may differ from the
CPU's by rounding, and a second run on the GPU has to be bit-identical to the first.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from mpi4py import MPI

from aladdin_mpi.options.algorithms import ALGORITHMS
from benchmarks.gpu_check import rows
from benchmarks.gpu_check.device import is_test_device
from benchmarks.gpu_check.training import (
    DETERMINISTIC,
    WORLD,
    losses,
    make,
    network,
    parameters,
)

PART = "equality"
TOLERANCE = 1e-3
QUANTISED_TOLERANCE = 5e-2
"""Largest difference from the CPU, relative to the largest change of a parameter in training.

A rounding difference can move a value to the next quantisation level or another value into a
sparse gradient, whose error is a share of one step. A lost or repeated bucket is a whole step, a
fifth of the change.
"""
QUANTISED = ("bf16", "int8", "int4", "dgc")


def train(folder: str, device: str, name: str, options: dict[str, Any]) -> torch.Tensor:
    """Return the parameters after training."""
    module = network()
    run = make(module, folder, device, name, **options)
    for _ in losses(run, module):
        pass
    return parameters(module)


def check_deterministic(folder: str, name: str, options: dict[str, Any]) -> None:
    """Compare one run on the accelerator with the CPU and with its own repetition."""
    if not is_test_device():
        torch.backends.cudnn.deterministic = True
    start = parameters(network())
    expected = train(folder, "cpu", name, options)
    result = train(folder, "gpu", name, options)
    repeated = train(folder, "gpu", name, options)
    change = largest(expected - start)
    error = largest(result - expected) / change if change else float("inf")
    spread = largest(repeated - result)
    bound = 0.0 if is_test_device() else _tolerance(name)
    if WORLD.rank == 0:
        figures = f"difference from the CPU {error:.1e} of the change, repetition {spread:.1e}"
        passed = error <= bound and spread == 0.0
        note = "" if passed else f"allowed: {bound:g} of the change, and 0 between repetitions"
        rows.report(PART, f"{name}, {WORLD.size} ranks", passed, figures, note)


def _tolerance(name: str) -> float:
    return QUANTISED_TOLERANCE if name.split()[-1] in QUANTISED else TOLERANCE


def largest(difference: torch.Tensor) -> float:
    """Return the largest magnitude over all ranks; NaN counts as infinite."""
    mine = difference.abs().max().nan_to_num(nan=float("inf")).item()
    return float(WORLD.allreduce(mine, MPI.MAX))


def check_accounting(folder: str, name: str, options: dict[str, Any] | None = None) -> None:
    """Run an algorithm whose result depends on timing: all samples are counted, all values finite.

    A run ends with an error if its server applied other gradients than the workers computed.
    """
    result = train(folder, "gpu", name, options or {})
    finite = bool(WORLD.allreduce(int(bool(result.isfinite().all())), MPI.MIN))
    if WORLD.rank == 0:
        title = f"{name}: accounting, {WORLD.size} ranks"
        rows.report(PART, title, finite, "all parameters finite" if finite else "not finite")


def main() -> None:
    """Check every algorithm and wire format."""
    folder = sys.argv[1]
    for name, options in DETERMINISTIC.items():
        check_deterministic(folder, name, options)
    for name in sorted(set(ALGORITHMS) - {each.split()[0] for each in DETERMINISTIC}):
        check_accounting(folder, name)


if __name__ == "__main__":
    main()
