"""Ranks that have died, as MPI knows them, and how the others leave: together.

Not every MPI_Finalize keeps a rank until the others need it no more (under srun a rank was gone
to which others still sent), and a death may hang it. So the ranks tell each other that they
leave. Where ranks may die they go without MPI_Finalize after that.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from aladdin_mpi.process import console, guard
from aladdin_mpi.transport.mpi import library  # before MPI: it decides how that begins
from aladdin_mpi.transport.mpi.library import SURVIVES  # and this one how it ends

# isort: split
from mpi4py import MPI

# isort: split
from aladdin_mpi.errors import PeerFailedError

library.settle()

__all__ = [
    "DEATHS",
    "SURVIVES",
    "as_failures",
    "dead",
    "end_those_left",
    "give_leave",
    "take_leave",
    "wait_gone",
]

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


def wait_gone(everyone: MPI.Intracomm) -> None:
    """Wait for a moment until all others are gone, so that this rank is the last."""
    _until(lambda: len(dead(everyone)) == everyone.size - 1, LEAVE_SECONDS)


def end_those_left(
    everyone: MPI.Intracomm,
    farewell: MPI.Intracomm,
    hanging: dict[int, str],
    others: Sequence[int],
    status: int,
) -> None:
    """End the job if ranks that were excluded never came back: they keep the launcher waiting.

    Args:
        everyone: of the whole job.
        farewell: see :func:`tell_exit`.
        hanging: those ranks, with their hosts.
        others: ranks that may still be at what their program does after its training.
        status: the job's exit status.
    """
    if not hanging.keys() - dead(everyone):
        return
    nothing = bytearray(0)
    _end_within(LAST_WORK_SECONDS, [farewell.Irecv(nothing, rank, EXIT_TAG) for rank in others])
    left = sorted(hanging.keys() - dead(everyone))
    if not left:
        return
    names = ", ".join(f"rank {rank} (host {hanging[rank]})" for rank in left)
    console.say(f"aladdin_mpi: {names} is still hanging: ended with the job")
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(guard.FLUSH_SECONDS)
    MPI.COMM_WORLD.Abort(status)


def _until(holds: Callable[[], bool], seconds: float) -> None:
    end = time.perf_counter() + seconds
    while not holds() and time.perf_counter() < end:
        time.sleep(POLL)


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
