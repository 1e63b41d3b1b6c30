"""How often a rank looks into MPI."""

from __future__ import annotations

import pytest

from aladdin_mpi.transport.pace import LONG_NAP, SHARE, SHORT_NAP, SPINS, Pace


def test_with_a_core_for_every_rank_a_wait_spins_first() -> None:
    pace = Pace(ranks=4, cores=4)
    assert not pace.shares
    assert [pace.nap(turn, 0.0) for turn in range(SPINS + 1)] == [0.0] * (SPINS + 1)
    assert 0 < pace.nap(SPINS + 1, 0.0) < pace.nap(SPINS + 2, 0.0) < SHORT_NAP
    assert pace.nap(10_000, 0.001) == SHORT_NAP
    assert pace.nap(10_000, 1.0) == LONG_NAP


def test_where_cores_are_shared_a_wait_never_spins_and_gets_a_sixteenth_longer() -> None:
    pace = Pace(ranks=5, cores=4)
    assert pace.shares
    assert pace.nap(0, 0.0) > 0
    for quiet in (0.002, 0.008, 0.016):
        assert pace.nap(0, quiet) == pytest.approx(SHARE * quiet)
    assert pace.nap(0, 100.0) == pace.nap(0, 1.0) <= 0.001


@pytest.mark.parametrize("ranks", [1, 100])
def test_the_background_looks_less_often_when_nothing_moves(ranks: int) -> None:
    pace = Pace(ranks, cores=2)
    assert pace.background(0.0) < pace.background(1.0) < 0.005
