"""The startup watchdog: a process that ends the job if the ranks do not connect in time."""

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
from itertools import zip_longest
from typing import NamedTuple

from aladdin_mpi.process import guard
from aladdin_mpi.process.identity import stat_fields

ENDS = signal.SIGXCPU
"""Signal that ends a starting rank, which then exits with this number as its status: if a signal
killed it, ULFM would let the job continue. (SIGHUP is blocked while MPI starts.)"""
BEGINS = "for its program to start"
SLICE = 1.0
"""Seconds between two readings of the clock; a longer interval means that the job was stopped."""
SPOKEN_SECONDS = 10.0
"""Time for the other watchdogs of this host to detect that one has reported for all."""
TURN_SECONDS = 2.0
"""Time for a rank to report before the next one does: the launcher ends the job then."""
LAST_TURN = 3
"""Ranks from this one on do not wait for each other."""
EXIT_SECONDS = 1.0
"""Time for a rank to end by itself, which a stopped one does not."""


def _detach(keep: int) -> None:
    """Close the parent's files but a pipe and stderr: open pipes keep the launcher running."""
    gc.disable()  # objects freed here belong to the parent
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    try:
        descriptors = {int(name) for name in os.listdir("/proc/self/fd")}
    except OSError:
        descriptors = set(range(1024))
    for descriptor in descriptors - {keep, 2}:
        with suppress(OSError):
            os.close(descriptor)


def _watch_parent(pipe: int, rank: int, pid: int, job: str, limit: float) -> None:
    """End the parent ``pid`` if its start takes too long, until the pipe's other end is closed.

    ``limit`` is the longest wait in seconds per step of the start, until the parent sets another.
    """
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    waited, last = 0.0, time.monotonic()
    turn = TURN_SECONDS * min(rank, LAST_TURN)
    what, is_own_work, computed = BEGINS, True, ""
    while waited < limit + turn:
        message = os.read(pipe, 4096) if poll.poll(1000 * SLICE) else None
        now = time.monotonic()
        before, computed = computed, _computing_time(pid)
        if not is_own_work or before == computed:
            waited += min(now - last, 2 * SLICE)
        last = now
        if message == b"":
            return
        for line in (message or b"").decode().splitlines():
            seconds, own, what = line.split("\t")
            limit, is_own_work, waited = float(seconds), own == "1", 0.0
    if os.getppid() == pid:  # the parent has not ended by itself
        _end_parent(
            pid,
            job,
            f"aladdin_mpi: error: rank {rank} (host {os.uname().nodename}) has waited {limit:g} "
            f"s {what}: a rank has failed, hangs, or is slower than --timeout allows; check the "
            "hosts of the others, then start the job again, or increase --timeout "
            "(docs/troubleshooting.md)\n",
        )


def _end_parent(pid: int, job: str, report: str) -> None:
    reports = _is_first_of_host(job)
    if reports:
        os.write(2, report.encode())
    os.close(2)
    os.kill(pid, ENDS)
    until = time.monotonic() + EXIT_SECONDS
    while os.getppid() == pid and time.monotonic() < until:
        time.sleep(0.01)
    if os.getppid() == pid:
        os.kill(pid, signal.SIGKILL)
    if reports:
        time.sleep(SPOKEN_SECONDS)


def _job_of(launcher: int) -> str:
    """Return a name shared by the ranks of a job on one host, whose parent is ``launcher``."""
    for names in (("PMIX_NAMESPACE",), ("SLURM_JOB_ID", "SLURM_STEP_ID")):
        if all(name in os.environ for name in names):
            return "-".join(os.environ[name] for name in names)
    return str(launcher)


def _computing_time(pid: int) -> str:
    """Return the CPU time of a process as text; constant if it is unknown."""
    try:
        return " ".join(stat_fields(pid)[11:13])
    except OSError:
        return ""


_reporting: socket.socket | None = None
"""Socket whose name only one process of this host can have at a time."""


def _is_first_of_host(job: str) -> bool:
    """Return whether no other rank of the job has reported on this host, as one line is enough."""
    global _reporting
    if not sys.platform.startswith("linux"):
        return True
    _reporting = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        _reporting.bind(f"\0aladdin_mpi-start-{os.getuid()}-{job[-60:]}")
    except OSError:
        return False
    return True


UNKNOWN = 1800.0
"""Seconds for each step of the start until the options are known; the default of ``--timeout``."""
LEAST, MEETING_LEAST = 15.0, 60.0
"""Least seconds for a step; the second follows work that differs by rank, such as loading data."""

MPI_STARTS = "for all ranks to start MPI"
LIBRARIES_LOAD = "for its own libraries, such as torch, to be loaded"
SCRIPT_BEGINS = "for its script to make a DataParallel"
RANKS_MEET = "for all ranks to make their communicators"


class _Watch(NamedTuple):
    """The watchdog process, the pipe to it, and this process's previous handler of `ENDS`."""

    pid: int
    pipe: int
    handler: int | None


_watch: _Watch | None = None
_limit = UNKNOWN


def begin(limit: float | None = None) -> None:
    """Watch this rank's start from now on, unless it is the only rank or has started MPI already.

    ``limit`` as in :func:`expect`; None if it is not known yet.
    """
    global _watch, _limit
    rank, size = guard.launched_place()
    mpi = sys.modules.get("mpi4py.MPI")
    if size == 1 or _watch is not None or (mpi is not None and mpi.Is_initialized()):
        return
    with suppress(OSError):  # without another process the start is not watched
        _limit = UNKNOWN if limit is None else limit
        pid, pipe = _fork(rank, max(_limit, LEAST))
        # A function of the C library, as Python's handlers do not run during MPI_Init.
        leave = ctypes.cast(ctypes.CDLL(None)._exit, ctypes.c_void_p).value
        _watch = _Watch(pid, pipe, _handle(leave))


def typed_limit(words: Sequence[str]) -> float | None:
    """Return ``--timeout`` of a command line that has not been parsed yet, if given."""
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        name, is_given, value = word.partition("=")
        if name == "--timeout":
            with suppress(ValueError):
                return float(value if is_given else following)
    return None


def expect(what: str, limit: float | None = None, least: float | None = None) -> None:
    """Report to the watchdog the event for which this rank waits.

    Args:
        what: one of the texts above.
        limit: longest wait in seconds, for this and later events; None: unchanged.
        least: lower bound of ``limit`` for this event; None: `LEAST`.
    """
    global _limit
    if _watch is None:
        return
    _limit = _limit if limit is None else limit
    seconds = max(_limit, LEAST if least is None else least)
    # A computing rank does not wait; it may be slow because its cores are busy.
    is_own_work = int(what == LIBRARIES_LOAD)
    with suppress(OSError):
        os.write(_watch.pipe, f"{seconds}\t{is_own_work}\t{what}\n".encode())


def end() -> None:
    """End the watch: the ranks have connected, and each later wait has its own limit."""
    global _watch
    if _watch is None:
        return
    (pid, pipe, handler), _watch = _watch, None
    os.close(pipe)
    with suppress(ChildProcessError, ProcessLookupError):
        if os.waitpid(pid, os.WNOHANG) == (0, 0):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    _handle(handler)


def _fork(rank: int, limit: float) -> tuple[int, int]:
    parent, launcher = os.getpid(), os.getppid()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Warns of threads in the program, whose locks the child does not need.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            _detach(keep=reading)
            _watch_parent(reading, rank, parent, _job_of(launcher), limit)
        finally:
            os._exit(0)
    os.close(reading)
    return pid, writing


def _handle(handler: int | None) -> int | None:
    """Let a C function handle `ENDS`; return the previous handler, None for the default."""
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes, set_handler.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    before: int | None = set_handler(ENDS, handler)
    return before
