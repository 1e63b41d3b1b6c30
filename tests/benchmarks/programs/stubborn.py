"""Ignore all signals that can be ignored, print ``late`` once all ranks have started, and wait."""

from __future__ import annotations

import signal
import time

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)

from mpi4py import MPI  # noqa: E402

MPI.COMM_WORLD.Barrier()
print("late", flush=True)
time.sleep(100)
