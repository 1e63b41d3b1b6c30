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
from contextlib import contextmanager
from functools import cache
from typing import Any

from aladdin_mpi.process import console, guard
from aladdin_mpi.transport.mpi import library  # before MPI, whose start and end it configures

# isort: split
from mpi4py import MPI

# isort: split
from aladdin_mpi.errors import PeerFailedError

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


# -- the end ---------------------------------------------------------------------------------------
def take_leave(farewell: MPI.Intracomm, last: int, timeout: float | None) -> None:
    """Announce this rank's exit to the rank that exits last, and wait for its permission."""
    empty = bytearray(0)
    _end_within(timeout, [farewell.Isend(empty, last), farewell.Irecv(empty, last)])


def announce_exit(farewell: MPI.Intracomm, last: int) -> None:
    """Announce the end of this process to the rank that exits last, as MPI may not report it."""

    def announce() -> None:
        _end_within(EXIT_SECONDS, [farewell.Isend(bytearray(0), last, EXIT_TAG)])

    guard.before_leaving(announce)


def give_leave(farewell: MPI.Intracomm, others: Sequence[int]) -> None:
    """Let the others exit, on the last rank, once no rank has anything to send."""
    empty = bytearray(0)
    _end_within(FAREWELL_SECONDS, [farewell.Irecv(empty, rank) for rank in others])
    _end_within(FAREWELL_SECONDS, [farewell.Isend(empty, rank) for rank in others])


def leave_last(
    farewell: MPI.Intracomm, hanging: dict[int, str], others: Sequence[int], status: int
) -> None:
    """Wait briefly at the end of this process until all others have exited.

    Not earlier, as the script may continue on all ranks. The job is aborted if excluded ranks have
    not exited, since they keep the launcher waiting.

    Args:
        farewell: see :func:`announce_exit`.
        hanging: excluded ranks, with their hosts.
        others: ranks whose program may still be working after its training.
        status: the job's exit status.
    """

    def leave() -> None:
        _wait_gone()
        if hanging.keys() - failed_ranks():
            exits = [farewell.Irecv(bytearray(0), rank, EXIT_TAG) for rank in others]
            _end_within(LAST_WORK_SECONDS, exits)
            _end_job(hanging, status)

    guard.before_leaving(leave)


@cache  # with several transports in one process, wait only once
def _wait_gone() -> None:
    end = time.perf_counter() + LEAVE_SECONDS
    while len(failed_ranks()) < MPI.COMM_WORLD.size - 1 and time.perf_counter() < end:
        time.sleep(POLL)


def _end_job(hanging: dict[int, str], status: int) -> None:
    remaining = sorted(hanging.keys() - failed_ranks())
    if not remaining:
        return
    names = ", ".join(f"rank {rank} (host {hanging[rank]})" for rank in remaining)
    console.say(f"aladdin_mpi: {names} is still hanging: ended with the job")
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(guard.FLUSH_SECONDS)
    MPI.COMM_WORLD.Abort(status)


def _end_within(seconds: float | None, requests: list[MPI.Request]) -> None:
    """Wait until each request has ended, including by its peer's failure, or time runs out."""
    start = time.perf_counter()
    while requests and (seconds is None or time.perf_counter() - start < seconds):
        requests = [request for request in requests if not _has_ended(request)]
        time.sleep(POLL)


def _has_ended(request: MPI.Request) -> bool:
    try:
        return bool(request.Test())
    except MPI.Exception:
        return True
