"""A limit on a rank's start: from its first line of Python until the ranks have met.

MPI_Init waits for every rank, for as long as that takes, and holds Python's lock meanwhile, so that
no thread can watch it. A rank that dies or stops before it has started MPI would keep the others
for ever; with ULFM the launcher does not end them either. So a process of its own looks at the
clock (:mod:`.watcher`). It is forked before anything large is imported, and is gone when the ranks
have met, or when this process is.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest

from aladdin_mpi.process import guard, watcher

UNKNOWN = 1800.0
"""Seconds for each step of the start until the options say how many; the default of
``--timeout``."""
LEAST = 15.0
"""Seconds for each step however few they say, ..."""
MEETING_LEAST = 60.0
"""... and where what the ranks do before may take unequally long: loading torch, and data."""

MPI_STARTS = "for all ranks to start MPI"
LIBRARIES_LOAD = "for its own libraries, such as torch, to be loaded"
RANKS_MEET = "for all ranks to make their communicators"


@dataclass(frozen=True)
class _Watched:
    """The process that watches, the pipe to it, and what this one did at `watcher.ENDS` before."""

    pid: int
    pipe: int
    handler: int | None


_watched: _Watched | None = None
_limit = UNKNOWN


def begin(limit: float | None = None) -> None:
    """Let this rank's start be watched from now on.

    Nothing is done for a rank that is alone, or has started MPI already.

    Args:
        limit: see :func:`expect`; None: it is not known yet.
    """
    global _watched, _limit
    rank, size = guard.launched_place()
    mpi = sys.modules.get("mpi4py.MPI")
    if size == 1 or _watched is not None or (mpi is not None and mpi.Is_initialized()):
        return
    with suppress(OSError):  # where no process can be had, the start is not watched
        _limit = UNKNOWN if limit is None else limit
        pid, pipe = _fork(rank, max(_limit, LEAST))
        _watched = _Watched(pid, pipe, _exit_when_told())


def typed_limit(words: Sequence[str]) -> float | None:
    """``--timeout`` of a command line that has not been read yet; None: it is not there."""
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        name, is_given, value = word.partition("=")
        if name == "--timeout":
            with suppress(ValueError):
                return float(value if is_given else following)
    return None


def expect(what: str, limit: float | None = None, least: float | None = None) -> None:
    """Say what is waited for from now on.

    Args:
        what: one of the texts above.
        limit: longest time in seconds, for this and what follows; None: as before.
        least: it is at least that; None: `LEAST`.
    """
    global _limit
    if _watched is None:
        return
    _limit = _limit if limit is None else limit
    seconds = max(_limit, LEAST if least is None else least)
    # A rank that computes is slow, not held up: its cores may be busy.
    is_own_work = int(what == LIBRARIES_LOAD)
    with suppress(OSError):
        os.write(_watched.pipe, f"{seconds}\t{is_own_work}\t{what}\n".encode())


def end() -> None:
    """The ranks have met: whoever waits from now on has a limit of its own."""
    global _watched
    if _watched is None:
        return
    watched, _watched = _watched, None
    os.close(watched.pipe)
    with suppress(ChildProcessError, ProcessLookupError):
        if os.waitpid(watched.pid, os.WNOHANG) == (0, 0):
            os.kill(watched.pid, signal.SIGKILL)
            os.waitpid(watched.pid, 0)
    _handle(watched.handler)


def _fork(rank: int, limit: float) -> tuple[int, int]:
    parent, launcher = os.getpid(), os.getppid()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Of threads, which the user's program may have by now: the child needs none of their locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            watcher.detach(keep=reading)
            watcher.Watcher(rank, parent, watcher.job_of(launcher), limit).watch(reading)
        finally:
            os._exit(0)
    os.close(reading)
    return pid, writing


def _exit_when_told() -> int | None:
    """Let `watcher.ENDS` end this process; returns what it did before.

    By the C library's own function: MPI_Init lets no handler of Python run.
    """
    return _handle(ctypes.cast(ctypes.CDLL(None)._exit, ctypes.c_void_p).value)


def _handle(handler: int | None) -> int | None:
    """Let a function of C's handle `watcher.ENDS`; returns the one before. None: the default."""
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes, set_handler.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    before: int | None = set_handler(watcher.ENDS, handler)
    return before
