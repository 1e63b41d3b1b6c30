"""The staleness bound of SSP and ASHL."""

from __future__ import annotations

import random

import pytest

from aladdin_mpi.exchange.server_algorithm import StalenessBound
from aladdin_mpi.flat.layout import Bucket

A, B = Bucket(0, 0, 5, 0), Bucket(1, 5, 9, 0)


class Answers:
    """A bound and the answers that it has returned."""

    def __init__(self, workers: int, bound: int) -> None:
        self.given: list[tuple[int, int]] = []
        self.bound = StalenessBound(workers, (A, B), bound, self.answer)

    def answer(self, worker: int, bucket: Bucket) -> None:
        self.given.append((worker, bucket.index))

    def step(self, worker: int, bucket: Bucket = A, steps: int = 1) -> None:
        self.bound.advance(worker, bucket, steps)
        self.bound.hold(worker, bucket)

    def take(self) -> list[tuple[int, int]]:
        given, self.given = self.given, []
        return given


def test_staleness_bound_holds_worker_too_far_ahead() -> None:
    answers = Answers(2, bound=1)
    answers.step(0)
    assert answers.take() == [(0, 0)]
    answers.step(0)
    assert answers.take() == []
    answers.step(1)
    assert sorted(answers.take()) == [(0, 0), (1, 0)]


def test_staleness_bound_has_separate_clocks_per_bucket() -> None:
    answers = Answers(2, bound=0)
    answers.step(0, A)
    answers.step(1, B)
    assert answers.take() == []
    answers.step(1, A)
    assert sorted(answers.take()) == [(0, 0), (1, 0)]
    answers.step(0, B)
    assert sorted(answers.take()) == [(0, 1), (1, 1)]


def test_staleness_bound_counts_unanswered_steps() -> None:
    answers = Answers(2, bound=2)
    assert answers.bound.advance(0, A, 3) == 3
    answers.step(0)
    assert answers.take() == []
    answers.bound.advance(1, A, 2)
    assert answers.take() == [(0, 0)]


def test_staleness_bound_ignores_worker_that_has_ended() -> None:
    answers = Answers(3, bound=0)
    answers.step(0, steps=4)
    answers.step(1, steps=2)
    answers.bound.ended(2)
    assert answers.take() == [(1, 0)]
    answers.bound.ended(1)
    assert answers.take() == [(0, 0)]


def test_staleness_bound_answers_ended_worker_at_once() -> None:
    answers = Answers(2, bound=0)
    answers.step(0, A)
    answers.step(0, B)
    assert answers.take() == []
    answers.bound.ended(0)
    assert answers.take() == [(0, 0), (0, 1)]
    answers.bound.ended(1)
    assert answers.take() == []


def test_staleness_bound_resets_clocks_with_each_segment() -> None:
    answers = Answers(2, bound=0)
    answers.bound.ended(1)
    answers.step(0, steps=5)
    assert answers.take() == [(0, 0)]
    answers.bound.open()
    answers.step(1)
    assert answers.take() == []  # worker 0 starts again, at step 0
    answers.step(0)
    assert sorted(answers.take()) == [(0, 0), (1, 0)]


@pytest.mark.parametrize("seed", range(30))
def test_staleness_bound_holds_in_random_step_orders(seed: int) -> None:
    r = random.Random(seed)
    workers, bound = r.randint(1, 5), r.randint(0, 4)
    answers = Answers(workers, bound)
    steps = [0] * workers
    waiting: set[int] = set()
    for _ in range(300):
        free = [w for w in range(workers) if w not in waiting]
        assert free, "deadlock"
        worker = r.choice(free)
        steps[worker] += 1
        waiting.add(worker)
        answers.step(worker)
        for answered, _bucket in answers.take():
            waiting.remove(answered)
            assert steps[answered] - min(steps) <= bound
        assert all(steps[w] - min(steps) > bound for w in waiting)
