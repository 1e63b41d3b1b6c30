"""The process that watches a rank's start; what it is told comes from :mod:`.startup`."""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress

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
