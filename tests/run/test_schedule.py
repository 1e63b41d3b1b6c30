"""The learning rate follows the samples of all workers."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest

from aladdin_mpi.optimizers.sgd import LearningRate
from aladdin_mpi.options.run import RunOptions

EPOCH, WORKERS = 1000, 4


def schedule(total: int = 10 * EPOCH, workers: int = WORKERS, **given: Any) -> LearningRate:
    settings = {"lr": 0.1, "warmup_epochs": 2.0, "lr_schedule": "constant", **given}
    options = RunOptions.model_validate(settings)
    return LearningRate(options, workers, EPOCH, total, options.lr)


@pytest.mark.parametrize(
    ("scaling", "scale"), [("linear", WORKERS), ("sqrt", sqrt(WORKERS)), ("none", 1)]
)
def test_the_rate_is_scaled_by_the_number_of_workers(scaling: str, scale: float) -> None:
    lr = schedule(lr_scaling=scaling)
    assert lr(5 * EPOCH) == pytest.approx(0.1 * scale)
    assert lr(0) == pytest.approx(0.1)


def test_the_warm_up_is_a_straight_line_up_to_the_full_rate() -> None:
    lr = schedule()
    assert [lr(samples) for samples in (0, 500, 1000, 1500, 2000, 2001)] == pytest.approx(
        [0.1, 0.175, 0.25, 0.325, 0.4, 0.4]
    )


def test_without_warm_up_it_starts_at_the_full_rate() -> None:
    assert schedule(warmup_epochs=0.0)(0) == pytest.approx(0.4)


def test_one_worker_needs_no_warm_up() -> None:
    lr = schedule(workers=1)
    assert {lr(samples) for samples in range(0, 10_000, 500)} == {0.1}


def test_steps_multiply_from_their_epoch_on() -> None:
    lr = schedule(lr_schedule="step", lr_steps=(3.0, 5.5), lr_decay=0.5)
    samples = (2999, 3000, 5499, 5500, 9999)
    assert [lr(s) for s in samples] == pytest.approx([0.4, 0.2, 0.2, 0.1, 0.1])


def test_the_cosine_runs_from_the_end_of_the_warm_up_to_nothing() -> None:
    lr = schedule(lr_schedule="cosine")
    assert lr(2000) == pytest.approx(0.4)
    assert lr(4000) == pytest.approx(0.4 * (1 + sqrt(0.5)) / 2)
    assert lr(6000) == pytest.approx(0.2)
    assert lr(10_000) == pytest.approx(0, abs=1e-12)
    rates = [lr(samples) for samples in range(2000, 10_001, 100)]
    assert rates == sorted(rates, reverse=True)


def test_a_run_shorter_than_its_warm_up_only_rises() -> None:
    lr = schedule(total=1000, lr_schedule="cosine")
    rates = [lr(samples) for samples in range(0, 1001, 100)]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(0.4)
