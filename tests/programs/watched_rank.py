"""Start the startup watcher, print its process id, and behave as the argument says."""

from __future__ import annotations

import os
import sys
import time

from aladdin_mpi.process import startup


def wait() -> None:
    startup.expect("for a test", 0.5)
    startup.expect("for another")
    time.sleep(60)


def compute_then_wait() -> None:
    startup.expect(startup.LIBRARIES_LOAD, 1.0)  # on busy cores it may get no core for so long
    end = time.monotonic() + 3.0
    while time.monotonic() < end:
        pass
    print("computed", flush=True)
    time.sleep(60)


def exit_at_once() -> None:
    startup.expect("for a test", 5)
    os._exit(0)


def end_twice() -> None:
    startup.expect("for a test", 5)
    startup.end()
    startup.end()


BEHAVIOURS = {each.__name__: each for each in (wait, compute_then_wait, exit_at_once, end_twice)}

startup.LEAST, startup.SLICE, startup.TURN_SECONDS = 0.1, 0.1, 0.3
startup.begin()
assert startup._watch is not None
print(startup._watch.pid, flush=True)
BEHAVIOURS[sys.argv[1]]()
