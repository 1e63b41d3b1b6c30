"""Check that a run with aladdin-ahead continues when a worker is killed.

Runs under ``mpirun --with-ft ulfm``; the argument is a folder for the runs.
"""

from __future__ import annotations

import os
import signal
import sys

from benchmarks.gpu_check import rows
from benchmarks.gpu_check.training import BATCH, WORLD, losses, make, network, parameters

PART = "recovery"
STEPS, STOP = 60, 10
"""Steps of each worker, and the step in which the last one is killed."""


def main() -> None:
    """Kill the last worker in a run and report the result of the others."""
    module = network()
    total = BATCH * STEPS * (WORLD.size - 1)
    run = make(module, sys.argv[1], "gpu", "aladdin-ahead", samples=total)
    for number, _ in enumerate(losses(run, module)):
        if number == STOP and WORLD.rank == WORLD.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    if WORLD.rank != 0:
        return
    found = run.summary
    lost = [failure["samples_lost"] for failure in found["failures"]]
    finite = bool(parameters(module).isfinite().all())
    applied = found["gradients_computed"] == found["gradients_applied"]
    passed = len(lost) == 1 and finite and applied and found["samples"] == total
    figures = f"{found['samples']} of {total} samples, {sum(lost)} lost with {len(lost)} worker"
    note = "" if applied and finite else "gradients lost, or parameters not finite"
    rows.report(PART, "aladdin-ahead: worker killed (SIGKILL), ULFM", passed, figures, note)


if __name__ == "__main__":
    main()
