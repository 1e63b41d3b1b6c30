"""Run the program of the argument on four ranks of a lab, as a benchmark does; print its name.

Handlers are set because a test run in a background shell job passes on an ignored SIGINT, and one
under nohup an ignored SIGHUP.
"""

from __future__ import annotations

import signal
import sys

from benchmarks.lab import Lab

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
with Lab(hosts=2) as lab:
    print(lab.name, flush=True)
    lab.run(4, [sys.argv[1]], timeout=100)
