"""The watchdog over the start of a job: a process that ends the job if the ranks never meet."""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import socket
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest

from aladdin_mpi.process import guard

ENDS = signal.SIGXCPU
"""Ends a rank while it starts, with this as its exit status: where a rank dies by a signal, ULFM
lets the job go on. (SIGHUP does not come through while MPI starts.)"""
BEGINS = "for its program to begin"
SLICE = 1.0
"""Seconds between two looks at the clock. What is much longer was no time of the job, which stood
still as a whole."""
SPOKEN_SECONDS = 10.0
"""Time for the other watchers of this host to come and see that one has spoken for all."""
TURN_SECONDS = 2.0
"""Time for a rank to speak before the next one does: the launcher ends the job then."""
LAST_TURN = 3
"""The ranks from here on do not wait for each other."""
DEATH_SECONDS = 1.0
"""Time for a rank to end by itself; one that is stopped does not."""


def detach(keep: int) -> None:
    """Have nothing of the parent's any more but a pipe and stderr.

    What keeps the launcher's pipes open would keep the launcher.
    """
    gc.disable()  # what is freed here is the parent's
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    try:
        found = {int(name) for name in os.listdir("/proc/self/fd")}
    except OSError:
        found = set(range(1024))
    for descriptor in found - {keep, 2}:
        with suppress(OSError):
            os.close(descriptor)


def job_of(launcher: int) -> str:
    """A name that the ranks of a job on one host have in common; ``launcher``: their parent."""
    for names in (("PMIX_NAMESPACE",), ("SLURM_JOB_ID", "SLURM_STEP_ID")):
        if all(name in os.environ for name in names):
            return "-".join(os.environ[name] for name in names)
    return str(launcher)


class Watcher:
    """Ends a rank whose start takes too long.

    Args:
        rank: its number.
        pid: its process, the parent of this one.
        job: see :func:`job_of`.
        limit: seconds for each thing that it waits for, until it says otherwise.
    """

    def __init__(self, rank: int, pid: int, job: str, limit: float) -> None:
        self._rank = rank
        self._pid = pid
        self._job = job
        self._limit = limit
        self._what = BEGINS
        self._is_own_work = True
        self._computed = ""

    def watch(self, pipe: int) -> None:
        """Until the pipe is closed, at its other end, or something takes too long."""
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        waited, last = 0.0, time.monotonic()
        turn = TURN_SECONDS * min(self._rank, LAST_TURN)
        while waited < self._limit + turn:
            told = os.read(pipe, 4096) if poll.poll(1000 * SLICE) else None
            now = time.monotonic()
            if not self._is_at_work():
                waited += min(now - last, 2 * SLICE)
            last = now
            if told == b"":
                return
            if told is not None:
                self._take(told.decode())
                waited = 0.0
        self._end_rank()

    def _take(self, lines: str) -> None:
        for line in lines.splitlines():
            limit, is_own_work, self._what = line.split("\t")
            self._limit, self._is_own_work = float(limit), is_own_work == "1"

    def _is_at_work(self) -> bool:
        """Whether the rank has computed since the last look, where that is what it is to do."""
        before, self._computed = self._computed, _computing_time(self._pid)
        return self._is_own_work and before != self._computed

    def _end_rank(self) -> None:
        if os.getppid() != self._pid:
            return  # it has gone by itself
        speaks = _first_of_host(self._job)
        if speaks:
            os.write(2, self._words().encode())
        os.close(2)
        os.kill(self._pid, ENDS)
        until = time.monotonic() + DEATH_SECONDS
        while os.getppid() == self._pid and time.monotonic() < until:
            time.sleep(0.01)
        if os.getppid() == self._pid:
            os.kill(self._pid, signal.SIGKILL)
        if speaks:
            time.sleep(SPOKEN_SECONDS)

    def _words(self) -> str:
        return (
            f"aladdin_mpi: error: rank {self._rank} (host {os.uname().nodename}) has waited "
            f"{self._limit:g} s {self._what}: a rank has died, hangs, or is slower than --timeout "
            "allows; look at the hosts of the others, then start the job again, or raise "
            "--timeout\n"
        )


def _computing_time(pid: int) -> str:
    """What a process has used of its cores; always the same where the system does not say."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return " ".join(file.read().rpartition(")")[2].split()[11:13])
    except OSError:
        return ""


_spoken: socket.socket | None = None
"""Has a name that no other process of this host has at the same time."""


def _first_of_host(job: str) -> bool:
    """Whether no other rank of the job has spoken on this host: one line is enough."""
    global _spoken
    if not sys.platform.startswith("linux"):
        return True
    _spoken = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        _spoken.bind(f"\0aladdin_mpi-start-{os.getuid()}-{job[-60:]}")
    except OSError:
        return False
    return True


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
            detach(keep=reading)
            Watcher(rank, parent, job_of(launcher), limit).watch(reading)
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
    before: int | None = set_handler(ENDS, handler)
    return before
