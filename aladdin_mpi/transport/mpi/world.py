"""All ranks of the job: who they are, which of them have failed, and how they leave together.

Imports no torch. Not every MPI_Finalize keeps a rank until the others need it no more (under srun
a rank was gone to which others still sent), and a failure may hang it. So the ranks exchange
messages before they leave. Where ranks may fail they go without MPI_Finalize after that.
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
from aladdin_mpi.transport.mpi import library  # before MPI: it decides how that begins and ends

# isort: split
from mpi4py import MPI

# isort: split
from aladdin_mpi.errors import PeerFailedError

library.settle()

FAILURES = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
"""Classes of the errors with which MPI reports that a rank has failed."""
LOOK_FOR_FAILURES = 0.02
"""Seconds between two queries for ranks that have failed."""

POLL = 0.0005
FAREWELL_SECONDS = 60.0
"""Longest time that rank 0 waits for the others to say that they leave, ..."""
LEAVE_SECONDS = 5.0
"""... and to be gone."""
EXIT_TAG = 1
EXIT_SECONDS = 0.2
"""Longest time for a rank to announce its end."""
LAST_WORK_SECONDS = 600.0
"""Longest time for what a program does after its training, where a rank still hangs."""


# -- before there is a transport -----------------------------------------------------------------
def place() -> tuple[int, int]:
    """Return this rank and the number of ranks."""
    return MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()


def everyones(fact: Any) -> list[Any]:
    """Return what each rank passes, in the order of ranks; waits for all of them.

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
    """Name the failed rank if a collective of all ranks ends by a failure.

    Raises:
        PeerFailedError: it did.
    """
    try:
        yield
    except MPI.Exception as error:
        if error.Get_error_class() not in FAILURES:
            raise
        raise PeerFailedError(min(failed_ranks(), default=-1), "not known yet") from error


# -- ranks that fail -------------------------------------------------------------------------------
def failed_ranks() -> set[int]:
    """Return the ranks that MPI itself knows to have failed."""
    failed = MPI.COMM_WORLD.Get_failed()
    if not failed.size:
        return set()
    group = MPI.COMM_WORLD.Get_group()
    ranks = MPI.Group.Translate_ranks(failed, list(range(failed.size)), group)
    failed.Free()  # mpi4py leaves that to its user
    group.Free()
    return set(ranks)


class MpiFailures:
    """The ranks that have failed, or are treated so, and the callbacks for them.

    ``survives``: the others continue after a failure. ``failed`` has all ranks that are dead to
    this one, ``excluded`` those among them that may live. ``untold`` are to be
    passed to ``actions``.
    """

    def __init__(self) -> None:
        self.survives = library.SURVIVES
        self.failed: frozenset[int] = frozenset()
        self.excluded: frozenset[int] = frozenset()
        self.untold: deque[int] = deque()
        self.actions: list[Callable[[int], None]] = []
        """Called with each rank that fails."""
        self._look_again = 0.0

    def may_be_failure(self, error: MPI.Exception, of_collective: bool) -> bool:
        """Whether this rank continues, since another's failure explains the error.

        Open MPI ends a collective between two of whose rounds a rank fails with any error.
        """
        return self.survives and (of_collective or error.Get_error_class() in FAILURES)

    def is_lost(self, rank: int) -> bool:
        """Whether MPI knows by now that the rank has failed, though no query has found it yet.

        Where the connection to it is gone Open MPI's MPI_Isend crashes (5.0, in ob1). To ask
        takes a fifth of a microsecond.
        """
        if not self.survives:
            return False
        group = MPI.COMM_WORLD.Get_failed()
        is_news = group.size > len(self.failed - self.excluded)
        group.Free()
        return is_news and rank in failed_ranks()

    def found(self, at_once: bool = False) -> list[int]:
        """Return the ranks that have failed since the last query; none if that was just now.

        They are found here where no operation of this rank has met them.
        """
        now = time.perf_counter()
        if now < self._look_again and not at_once:
            return []
        self._look_again = now + LOOK_FOR_FAILURES
        return sorted(failed_ranks() - self.failed)

    def add(self, rank: int) -> None:
        """Note that a rank has failed."""
        self.failed |= {rank}
        self.untold.append(rank)


# -- the end ---------------------------------------------------------------------------------------
def take_leave(farewell: MPI.Intracomm, last: int, timeout: float | None) -> None:
    """Tell the rank that leaves last that this one leaves, and wait for its leave."""
    nothing = bytearray(0)
    _end_within(timeout, [farewell.Isend(nothing, last), farewell.Irecv(nothing, last)])


def tell_exit(farewell: MPI.Intracomm, last: int) -> None:
    """Tell the rank that leaves last when this process ends: MPI does not report each."""

    def tell() -> None:
        _end_within(EXIT_SECONDS, [farewell.Isend(bytearray(0), last, EXIT_TAG)])

    guard.before_leaving(tell)


def give_leave(farewell: MPI.Intracomm, others: Sequence[int]) -> None:
    """Let the others leave, as the last rank, when no rank has anything to send any more."""
    nothing = bytearray(0)
    _end_within(FAREWELL_SECONDS, [farewell.Irecv(nothing, rank) for rank in others])
    _end_within(FAREWELL_SECONDS, [farewell.Isend(nothing, rank) for rank in others])


def leave_last(
    farewell: MPI.Intracomm, hanging: dict[int, str], others: Sequence[int], status: int
) -> None:
    """When this process ends, wait for a moment until all others are gone.

    Not before: the script may continue, and the others with it. The job is ended if ranks that
    were excluded never came back: they keep the launcher waiting.

    Args:
        farewell: see :func:`tell_exit`.
        hanging: ranks that were excluded, with their hosts.
        others: ranks that may still be at what their program does after its training.
        status: the job's exit status.
    """

    def leave() -> None:
        _wait_gone()
        if hanging.keys() - failed_ranks():
            exits = [farewell.Irecv(bytearray(0), rank, EXIT_TAG) for rank in others]
            _end_within(LAST_WORK_SECONDS, exits)
            _end_job(hanging, status)

    guard.before_leaving(leave)


@cache  # of several transports in one process only one waits
def _wait_gone() -> None:
    end = time.perf_counter() + LEAVE_SECONDS
    while len(failed_ranks()) < MPI.COMM_WORLD.size - 1 and time.perf_counter() < end:
        time.sleep(POLL)


def _end_job(hanging: dict[int, str], status: int) -> None:
    left = sorted(hanging.keys() - failed_ranks())
    if not left:
        return
    names = ", ".join(f"rank {rank} (host {hanging[rank]})" for rank in left)
    console.say(f"aladdin_mpi: {names} is still hanging: ended with the job")
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(guard.FLUSH_SECONDS)
    MPI.COMM_WORLD.Abort(status)


def _end_within(seconds: float | None, requests: list[MPI.Request]) -> None:
    """Wait until each has ended, be it because its peer has failed, or the time is over."""
    start = time.perf_counter()
    while requests and (seconds is None or time.perf_counter() - start < seconds):
        requests = [request for request in requests if not _has_ended(request)]
        time.sleep(POLL)


def _has_ended(request: MPI.Request) -> bool:
    try:
        return bool(request.Test())
    except MPI.Exception:
        return True
