"""A test that hangs on rank 1 while the others wait; ``tests/test_under_mpirun.py`` runs it."""

from __future__ import annotations

import threading

from mpi4py import MPI


def test_uneven() -> None:
    if MPI.COMM_WORLD.rank == 1:
        threading.Event().wait()
    MPI.COMM_WORLD.Barrier()
