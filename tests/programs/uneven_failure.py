"""A test that fails on rank 1 while the others wait; ``tests/test_under_mpirun.py`` runs it."""

from __future__ import annotations

from mpi4py import MPI


def test_uneven() -> None:
    world = MPI.COMM_WORLD
    assert world.rank != 1, "only here"
    world.Barrier()
