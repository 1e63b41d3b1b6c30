"""Run a module as ``python -m`` does, with the selected accelerator loaded first.

Arguments: the module and its arguments.
"""

from __future__ import annotations

import runpy
import sys

from benchmarks.gpu_check import device

if __name__ == "__main__":
    device.load()
    name = sys.argv[1]
    sys.argv = sys.argv[1:]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
