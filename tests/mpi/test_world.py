"""The launcher meets the assumptions of the other tests in this directory."""

from __future__ import annotations

from mpi4py import MPI


def test_every_rank_of_the_launcher_takes_part() -> None:
    world = MPI.COMM_WORLD
    assert world.size > 1
    assert world.allgather(world.rank) == list(range(world.size))


def test_threads_may_call_mpi() -> None:
    assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
