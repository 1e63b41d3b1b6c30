"""What a checkpoint holds of an object."""

from __future__ import annotations

import random

import pytest

from aladdin_mpi.flat.state import Stateful, saved


class Owner(Stateful):
    SAVED = saved("draws")

    def __init__(self, seed: int) -> None:
        self.draws = random.Random(seed)


@pytest.mark.parametrize("is_old", [False, True])
def test_saved_random_generator_continues_its_sequence(is_old: bool) -> None:
    owner, other = Owner(1), Owner(2)
    owner.draws.gauss(0.0, 1.0)  # which keeps a second one
    state = owner.state_dict()
    if is_old:  # as checkpoints held it
        state = {"draws": owner.draws.getstate()}
    other.load_state_dict(state)
    assert [other.draws.gauss(0.0, 1.0) for _ in range(3)] == [
        owner.draws.gauss(0.0, 1.0) for _ in range(3)
    ]
