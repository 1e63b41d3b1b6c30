"""All ranks of the job: their hosts, failure detection, and the coordinated end.

Does not import torch. Some implementations of MPI_Finalize do not keep a rank until the others
need it no more (under srun a rank had exited while others still sent to it), and a failure may hang
it. So the ranks exchange messages before they exit. With fault tolerance they then exit without
MPI_Finalize.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

from aladdin_mpi.process import console, guard
from aladdin_mpi.transport.mpi import library  # before MPI, whose start and end it configures

# isort: split
from mpi4py import MPI

# isort: split
from aladdin_mpi.errors import PeerFailedError
from aladdin_mpi.process.identity import ProcessIdentity

library.settle()

FAILURES = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
"""Classes of the errors with which MPI reports a failed rank."""
LOOK_FOR_FAILURES = 0.02
"""Seconds between two queries for failed ranks."""

POLL = 0.0005
FAREWELL_SECONDS = 60.0
"""Longest time that rank 0 waits for the others to announce their exit, ..."""
LEAVE_SECONDS = 5.0
"""... and to exit."""
EXIT_TAG = 1
EXIT_SECONDS = 0.2
"""Longest time for a rank to announce its end."""
LAST_WORK_SECONDS = 600.0
"""Longest time for a program's work after its training, if a rank still hangs."""


# -- before a transport exists ---------------------------------------------------------------
def place() -> tuple[int, int]:
    """Return this rank and the number of ranks."""
    return MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()


def everyones(fact: Any) -> list[Any]:
    """Return all ranks' ``fact`` in rank order; waits for all of them.

    Raises:
        PeerFailedError: a rank has failed already.
    """
    with as_failures():
        facts: list[Any] = MPI.COMM_WORLD.allgather(fact)
        return facts


def hosts() -> list[str]:
    """Return the name of every rank's host; see :func:`everyones`."""
    return everyones(MPI.Get_processor_name())


@contextmanager
def as_failures() -> Iterator[None]:
    """Convert the error of a collective that ends by a failure.

    Raises:
        PeerFailedError: names the failed rank.
    """
    try:
        yield
    except MPI.Exception as error:
        if error.Get_error_class() not in FAILURES:
            raise
        raise PeerFailedError(min(failed_ranks(), default=-1), "not known yet") from error


# -- failures --------------------------------------------------------------------------------------
def failed_ranks() -> set[int]:
    """Return the ranks that MPI has detected as failed."""
    failed = MPI.COMM_WORLD.Get_failed()
    if not failed.size:
        return set()
    group = MPI.COMM_WORLD.Get_group()
    ranks = MPI.Group.Translate_ranks(failed, list(range(failed.size)), group)
    failed.Free()  # mpi4py leaves this to its user
    group.Free()
    return set(ranks)


class MpiFailures:
    """The ranks that have failed, or are treated as failed, and the callbacks for them.

    ``survives``: other ranks continue after a failure. ``failed`` includes the ``excluded`` ranks,
    which may still run. ``unreported`` are to be passed to ``actions``.
    """

    def __init__(self) -> None:
        self.survives = library.SURVIVES
        self.failed: frozenset[int] = frozenset()
        self.excluded: frozenset[int] = frozenset()
        self.unreported: deque[int] = deque()
        self.actions: list[Callable[[int], None]] = []
        """Functions called with each rank that fails."""
        self._look_again = 0.0

    def may_be_failure(self, error: MPI.Exception, of_collective: bool) -> bool:
        """Return whether a failure explains the error, so that this rank continues.

        If a rank fails between two rounds of a collective, Open MPI may end it with any error.
        """
        return self.survives and (of_collective or error.Get_error_class() in FAILURES)

    def is_lost(self, rank: int) -> bool:
        """Return whether MPI has detected the rank's failure, even before the next query.

        If the connection to it is closed, Open MPI's MPI_Isend crashes (5.0, in ob1). The query
        takes a fifth of a microsecond.
        """
        if not self.survives:
            return False
        group = MPI.COMM_WORLD.Get_failed()
        is_news = group.size > len(self.failed - self.excluded)
        group.Free()
        return is_news and rank in failed_ranks()

    def new_failures(self, at_once: bool = False) -> list[int]:
        """Return the ranks that have failed since the last query; none if that was just now.

        It detects failures that no operation of this rank has met.
        """
        now = time.perf_counter()
        if now < self._look_again and not at_once:
            return []
        self._look_again = now + LOOK_FOR_FAILURES
        return sorted(failed_ranks() - self.failed)

    def add(self, rank: int) -> None:
        """Record a failed rank."""
        self.failed |= {rank}
        self.unreported.append(rank)

    def readmit(self, rank: int) -> None:
        """Record that a rank is not excluded any more; it may have failed since."""
        self.excluded -= {rank}
        if rank not in failed_ranks():
            self.failed -= {rank}


class HangingRanks:
    """Excluded ranks that MPI does not report as failed: they would keep the job from ending.

    Open MPI's launcher waits for ever for two stopped processes after MPI_Abort with ULFM (5.0),
    and can lose the job's status. So the other ranks of their host kill them.

    Args:
        failures: names the excluded ranks.
        hosts: name of every rank's host.
        processes: every rank's process, None where it is unknown.
    """

    def __init__(
        self,
        failures: MpiFailures,
        hosts: Sequence[str],
        processes: Sequence[ProcessIdentity | None],
    ) -> None:
        self._failures = failures
        self._hosts = hosts
        self._processes = processes

    def ranks(self) -> list[int]:
        """Return the ranks that still hang."""
        return sorted(self._failures.excluded - failed_ranks())

    def names(self, ranks: Sequence[int]) -> str:
        """Return ranks with their hosts, in words."""
        return ", ".join(f"rank {rank} (host {self._hosts[rank]})" for rank in ranks)

    def kill_from_first(self) -> None:
        """Kill those on this rank's host, if it is the first surviving rank there."""
        own = MPI.COMM_WORLD.Get_rank()
        before = set(range(own)) - self._failures.failed
        if all(self._hosts[rank] != self._hosts[own] for rank in before):
            self._kill(self.ranks())

    def kill_with_stopped(self) -> None:
        """Kill those on this rank's host, and others there whose process is stopped.

        Those will not be excluded any more if the job, or this side of a cut network, ends. Wait
        until MPI has learned of their end, on which the way to end the job depends.
        """
        stopped = [
            r for r, process in enumerate(self._processes) if process and process.is_stopped()
        ]
        before = failed_ranks()
        killed = self._kill(sorted({*self.ranks(), *stopped}))
        _await_failures(len(before.union(killed)))

    def _kill(self, ranks: Sequence[int]) -> list[int]:
        """Kill those of ``ranks`` on this rank's host, and return them."""
        host = self._hosts[MPI.COMM_WORLD.Get_rank()]
        here = [rank for rank in ranks if self._hosts[rank] == host]
        if here:
            console.say(f"aladdin_mpi: still hanging, killed: {self.names(here)}")
        for rank in here:
            if (process := self._processes[rank]) is not None:
                process.kill()
        return here


# -- the end ---------------------------------------------------------------------------------------
def take_leave(farewell: MPI.Intracomm, last: int, timeout: float | None) -> None:
    """Announce this rank's exit to the rank that exits last, and wait for its permission."""
    empty = bytearray(0)
    _end_within(timeout, [farewell.Isend(empty, last), farewell.Irecv(empty, last)])


def announce_exit(farewell: MPI.Intracomm, last: int, hanging: HangingRanks) -> None:
    """Announce the end of this process to the rank that exits last, as MPI may not report it.

    Before that, the host's first rank kills those that hang.
    """

    def announce() -> None:
        hanging.kill_from_first()
        _end_within(EXIT_SECONDS, [farewell.Isend(bytearray(0), last, EXIT_TAG)])

    guard.before_leaving(announce)


def give_leave(farewell: MPI.Intracomm, others: Sequence[int]) -> None:
    """Let the others exit, on the last rank, once no rank has anything to send."""
    empty = bytearray(0)
    _end_within(FAREWELL_SECONDS, [farewell.Irecv(empty, rank) for rank in others])
    _end_within(FAREWELL_SECONDS, [farewell.Isend(empty, rank) for rank in others])


def leave_last(
    farewell: MPI.Intracomm, hanging: HangingRanks, others: Sequence[int], status: int
) -> None:
    """Wait briefly at the end of this process until all others have exited.

    Not earlier, as the script may continue on all ranks. Excluded ranks that hang are killed on
    every host, as they would keep the launcher waiting. The job is aborted if some remain.

    Args:
        farewell: see :func:`announce_exit`.
        hanging: the ranks that hang.
        others: ranks whose program may still be working after its training.
        status: the job's exit status.
    """

    def leave() -> None:
        if hanging.ranks():
            exits = [farewell.Irecv(bytearray(0), rank, EXIT_TAG) for rank in others]
            _end_within(LAST_WORK_SECONDS, exits)
            hanging.kill_from_first()
        _wait_gone()
        if remaining := hanging.ranks():
            _abort_with(hanging.names(remaining), status)

    guard.before_leaving(leave)


@cache  # with several transports in one process, wait only once
def _wait_gone() -> None:
    _await_failures(MPI.COMM_WORLD.size - 1)


def _await_failures(count: int) -> None:
    """Wait briefly until MPI has detected this number of failed ranks."""
    end = time.perf_counter() + LEAVE_SECONDS
    while len(failed_ranks()) < count and time.perf_counter() < end:
        with suppress(MPI.Exception):
            MPI.COMM_WORLD.Iprobe()  # Open MPI learns of failures only while it makes progress
        time.sleep(POLL)


def _abort_with(names: str, status: int) -> None:
    console.say(f"aladdin_mpi: still hanging, ended with the job: {names}")
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(guard.FLUSH_SECONDS)
    MPI.COMM_WORLD.Abort(status)


def _end_within(seconds: float | None, requests: list[MPI.Request]) -> None:
    """Wait until each request has ended, including by its peer's failure, or time runs out."""
    start = time.perf_counter()
    while requests and (seconds is None or time.perf_counter() - start < seconds):
        requests = [request for request in requests if not has_ended(request)]
        time.sleep(POLL)


def has_ended(request: MPI.Request) -> bool:
    """Return whether a request has ended, including by a failure."""
    try:
        return bool(request.Test())
    except MPI.Exception:
        return True
