"""Run a module as ``python -m`` does, with the selected accelerator loaded first.

Arguments: the module and its arguments. Shortly before its time limit the program prints the stack
of every thread, so that the log shows where a program that did not finish was.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import sys

from benchmarks.gpu_check import device

LIMIT = "ALADDIN_MPI_GPU_CHECK_SECONDS"
"""Environment variable with the time limit, in seconds."""
MARGIN = 0.05
"""Share of the time limit that is left when the stacks are printed."""

if __name__ == "__main__":
    if LIMIT in os.environ:
        faulthandler.dump_traceback_later((1 - MARGIN) * float(os.environ[LIMIT]))
    device.load()
    name = sys.argv[1]
    sys.argv = sys.argv[1:]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
