"""Check a run that is stopped by SIGUSR2, as by a batch system, and resumed by another job.

Runs under mpirun; the arguments are a folder for the runs, the name of a case, and "stop" or
"resume". The stopped job ends with the status of a suspended run.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch

from benchmarks.gpu_check import rows
from benchmarks.gpu_check.device import is_test_device
from benchmarks.gpu_check.training import (
    BATCH,
    DETERMINISTIC,
    WORLD,
    losses,
    make,
    network,
    parameters,
)

PART = "recovery"
STEPS, STOP = 24, 9
"""Steps of a worker, and the step in which the last rank receives the signal."""


def train(folder: str, name: str, is_stopped: bool, **options: Any) -> tuple[torch.Tensor, Any]:
    """Return the parameters and, on rank 0, the summary of a run."""
    module = network()
    total = BATCH * STEPS * WORLD.size
    given = DETERMINISTIC.get(name, {}) | options
    run = make(module, folder, "gpu", name, samples=total, **given)
    for number, _ in enumerate(losses(run, module)):
        if is_stopped and number == STOP and WORLD.rank == WORLD.size - 1:
            os.kill(os.getpid(), signal.SIGUSR2)
    return parameters(module), run.summary


def check_resumed(folder: str, name: str) -> None:
    """Resume the run in ``folder`` and compare it with an uninterrupted run."""
    stopped = f"{folder}/{name.replace(' ', '-')}-stopped"
    expected, _ = train(folder, name, False)
    result, summary = train(folder, name, False, resume=stopped)
    error = float((result - expected).abs().max())
    largest = max(WORLD.allgather(error))
    if WORLD.rank != 0:
        return
    total = BATCH * STEPS * WORLD.size
    complete = summary["gradients_computed"] == summary["gradients_applied"]
    passed = complete and summary["samples"] == total
    figures = f"{summary['samples']} of {total} samples"
    if name in DETERMINISTIC:
        passed = passed and largest == 0.0
        figures += f", difference from an uninterrupted run {largest:.1e}"
    rows.report(PART, f"{name}: stopped by SIGUSR2 and resumed", passed, figures)


def main() -> None:
    """Stop a run, or resume it."""
    folder, name, action = sys.argv[1:]
    if not is_test_device():
        torch.backends.cudnn.deterministic = True
    if action == "stop":
        run_dir = f"{folder}/{name.replace(' ', '-')}-stopped"
        train(folder, name, True, run_dir=run_dir)
        sys.exit("the signal did not stop the run")
    check_resumed(folder, name)


if __name__ == "__main__":
    main()
