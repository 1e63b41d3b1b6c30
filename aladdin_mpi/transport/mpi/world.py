"""All ranks of the job before there is a transport between them, which needs torch."""

from __future__ import annotations

from typing import Any

from aladdin_mpi.transport.mpi import (
    fault_tolerance,  # before MPI: it decides how that begins and ends
)

# isort: split
from mpi4py import MPI


def place() -> tuple[int, int]:
    """This rank and the number of ranks."""
    return MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()


def everyones(fact: Any) -> list[Any]:
    """What each rank says, in the order of ranks; it waits for all of them.

    Raises:
        PeerFailedError: a rank has died already.
    """
    with fault_tolerance.as_failures():
        found: list[Any] = MPI.COMM_WORLD.allgather(fact)
        return found


def hosts() -> list[str]:
    """The name of every rank's host; see :func:`everyones`."""
    return everyones(MPI.Get_processor_name())
