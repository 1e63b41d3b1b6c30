"""Ranks that have died, as MPI knows them, and how the others leave: together.

Not every MPI_Finalize keeps a rank until the others need it no more (under srun a rank was gone
to which others still sent), and a death may hang it. So the ranks tell each other that they
leave. Where ranks may die they go without MPI_Finalize after that.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

from aladdin_mpi.process import console, guard
from aladdin_mpi.transport.mpi import library  # before MPI: it decides how that begins

# isort: split
from mpi4py import MPI

# isort: split
from aladdin_mpi.errors import PeerFailedError

library.settle()

DEATHS = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
"""Classes of the errors with which MPI says that a rank has died."""

POLL = 0.0005
FAREWELL_SECONDS = 60.0
"""Longest time that rank 0 waits for the others to say that they leave, ..."""
LEAVE_SECONDS = 5.0
"""... and to be gone."""
EXIT_TAG = 1
EXIT_SECONDS = 0.2
"""Longest time for a rank to tell of its end."""
LAST_WORK_SECONDS = 600.0
"""Longest time for what a program does after its training, where a rank still hangs."""


def dead(everyone: MPI.Intracomm) -> set[int]:
    """The ranks that MPI itself knows to have died."""
    failed = everyone.Get_failed()
    if not failed.size:
        return set()
    group = everyone.Get_group()
    ranks = MPI.Group.Translate_ranks(failed, list(range(failed.size)), group)
    failed.Free()  # mpi4py leaves that to its user
    group.Free()
    return set(ranks)


@contextmanager
def as_failures() -> Iterator[None]:
    """Say of a collective of all that ends by a death who has died.

    Raises:
        PeerFailedError: it did.
    """
    try:
        yield
    except MPI.Exception as error:
        if error.Get_error_class() not in DEATHS:
            raise
        raise PeerFailedError(min(dead(MPI.COMM_WORLD), default=-1), "not known yet") from error


def take_leave(farewell: MPI.Intracomm, last: int, timeout: float | None) -> None:
    """Tell the rank that leaves last that this one leaves, and wait for its leave."""
    nothing = bytearray(0)
    _end_within(timeout, [farewell.Isend(nothing, last), farewell.Irecv(nothing, last)])


def tell_exit(farewell: MPI.Intracomm, last: int) -> None:
    """Tell the rank that leaves last when this process ends: MPI does not say so of each."""

    def tell() -> None:
        _end_within(EXIT_SECONDS, [farewell.Isend(bytearray(0), last, EXIT_TAG)])

    guard.before_leaving(tell)


def give_leave(farewell: MPI.Intracomm, others: Sequence[int]) -> None:
    """The last rank lets the others leave, when nobody has anything to send any more."""
    nothing = bytearray(0)
    _end_within(FAREWELL_SECONDS, [farewell.Irecv(nothing, rank) for rank in others])
    _end_within(FAREWELL_SECONDS, [farewell.Isend(nothing, rank) for rank in others])


def leave_last(
    farewell: MPI.Intracomm, hanging: dict[int, str], others: Sequence[int], status: int
) -> None:
    """When this process ends, wait for a moment until all others are gone.

    Not before: the script may go on, and the others with it. The job is ended if ranks that were
    excluded never come back: they keep the launcher waiting.

    Args:
        farewell: see :func:`tell_exit`.
        hanging: ranks that were excluded, with their hosts.
        others: ranks that may still be at what their program does after its training.
        status: the job's exit status.
    """

    def leave() -> None:
        _wait_gone()
        if hanging.keys() - dead(MPI.COMM_WORLD):
            exits = [farewell.Irecv(bytearray(0), rank, EXIT_TAG) for rank in others]
            _end_within(LAST_WORK_SECONDS, exits)
            _end_job(hanging, status)

    guard.before_leaving(leave)


@cache  # of several transports in one process only one waits
def _wait_gone() -> None:
    end = time.perf_counter() + LEAVE_SECONDS
    while len(dead(MPI.COMM_WORLD)) < MPI.COMM_WORLD.size - 1 and time.perf_counter() < end:
        time.sleep(POLL)


def _end_job(hanging: dict[int, str], status: int) -> None:
    left = sorted(hanging.keys() - dead(MPI.COMM_WORLD))
    if not left:
        return
    names = ", ".join(f"rank {rank} (host {hanging[rank]})" for rank in left)
    console.say(f"aladdin_mpi: {names} is still hanging: ended with the job")
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(guard.FLUSH_SECONDS)
    MPI.COMM_WORLD.Abort(status)


def _end_within(seconds: float | None, requests: list[MPI.Request]) -> None:
    """Wait until each has ended, be it because its peer has died, or the time is over."""
    start = time.perf_counter()
    while requests and (seconds is None or time.perf_counter() - start < seconds):
        requests = [request for request in requests if not _has_ended(request)]
        time.sleep(POLL)


def _has_ended(request: MPI.Request) -> bool:
    try:
        return bool(request.Test())
    except MPI.Exception:
        return True
