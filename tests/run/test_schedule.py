"""The learning-rate schedule follows the samples of all workers."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest

from aladdin_mpi.optimizers.sgd import LearningRate
from aladdin_mpi.options.run import RunOptions
from aladdin_mpi.session.coordinator import Coordinator
from tests.simulation import start

EPOCH, WORKERS = 1000, 4


def schedule(total: int = 10 * EPOCH, workers: int = WORKERS, **given: Any) -> LearningRate:
    settings = {"lr": 0.1, "warmup_epochs": 2.0, "lr_schedule": "constant", **given}
    options = RunOptions.model_validate(settings)
    return LearningRate(options, workers, EPOCH, total, options.lr)


@pytest.mark.parametrize(
    ("scaling", "scale"), [("linear", WORKERS), ("sqrt", sqrt(WORKERS)), ("none", 1)]
)
def test_learning_rate_is_scaled_by_the_number_of_workers(scaling: str, scale: float) -> None:
    lr = schedule(lr_scaling=scaling)
    assert lr(5 * EPOCH) == pytest.approx(0.1 * scale)
    assert lr(0) == pytest.approx(0.1)


def test_warmup_rises_linearly_to_the_full_learning_rate() -> None:
    lr = schedule()
    assert [lr(samples) for samples in (0, 500, 1000, 1500, 2000, 2001)] == pytest.approx(
        [0.1, 0.175, 0.25, 0.325, 0.4, 0.4]
    )


def test_learning_rate_starts_at_full_value_without_warmup() -> None:
    assert schedule(warmup_epochs=0.0)(0) == pytest.approx(0.4)


def test_single_worker_has_no_learning_rate_warmup() -> None:
    lr = schedule(workers=1)
    assert {lr(samples) for samples in range(0, 10_000, 500)} == {0.1}


def test_step_schedule_decays_from_each_listed_epoch() -> None:
    lr = schedule(lr_schedule="step", lr_steps=(3.0, 5.5), lr_decay=0.5)
    samples = (2999, 3000, 5499, 5500, 9999)
    assert [lr(s) for s in samples] == pytest.approx([0.4, 0.2, 0.2, 0.1, 0.1])


def test_cosine_schedule_falls_from_the_end_of_warmup_to_zero() -> None:
    lr = schedule(lr_schedule="cosine")
    assert lr(2000) == pytest.approx(0.4)
    assert lr(4000) == pytest.approx(0.4 * (1 + sqrt(0.5)) / 2)
    assert lr(6000) == pytest.approx(0.2)
    assert lr(10_000) == pytest.approx(0, abs=1e-12)
    rates = [lr(samples) for samples in range(2000, 10_001, 100)]
    assert rates == sorted(rates, reverse=True)


def test_learning_rate_only_rises_in_a_run_shorter_than_its_warmup() -> None:
    lr = schedule(total=1000, lr_schedule="cosine")
    rates = [lr(samples) for samples in range(0, 1001, 100)]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(0.4)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_shown_rate_is_the_optimizers_before_any_report(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[float] = []
    begin = Coordinator.begin

    def noted_begin(run: Coordinator) -> None:
        rates.append(run.lr)
        begin(run)

    monkeypatch.setattr(Coordinator, "begin", noted_begin)
    plan = ["--compute", "timed", "--model", "size:0.01", "--workers", 2, "--steps", 1, "--quiet"]
    start(
        *plan, "--optimizer", optimizer, "--lr", 0.25, "--warmup-epochs", 0, "--lr-scaling", "none"
    )
    assert rates == [0.25]
