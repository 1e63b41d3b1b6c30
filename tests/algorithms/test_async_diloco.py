"""Asynchronous DiLoCo: Delayed Nesterov, dynamic local updates, grace periods and weights."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from aladdin_mpi.algorithms.async_diloco import (
    AsyncDilocoServer,
    AsyncDilocoWorker,
    DelayedNesterov,
    GracePeriod,
    LocalSteps,
)
from aladdin_mpi.control.budget import SampleLease
from aladdin_mpi.exchange.server_link import LocalDifference
from aladdin_mpi.exchange.server_mailbox import ReceivedBucket
from aladdin_mpi.flat.layout import Bucket, cut
from aladdin_mpi.transport.base import Transport
from tests.checks import check_converges, check_resumed
from tests.commands import summary, train
from tests.drawn_jobs import any_served_job
from tests.launch import needs
from tests.quadratic import network
from tests.roles import Job, any_network, run, single_process
from tests.simulation import start

PLAIN: dict[str, Any] = {"momentum": 0.0, "weight_decay": 0.0}


def plain(**options: Any) -> dict[str, Any]:
    return {**PLAIN, "async_diloco": options}


# -- Delayed Nesterov ----------------------------------------------------------------------
class PaperRule:
    """The rule as published, in float64: ``delta = start - end`` is subtracted.

    ``c`` and ``N`` as in the paper; ``t`` counts the arrivals.
    """

    def __init__(self, theta: Tensor, eps: float, beta: float, c: float, n: int) -> None:
        self.theta, self.eps, self.beta, self.c, self.n = theta.double().clone(), eps, beta, c, n
        self.m = torch.zeros_like(self.theta)
        self.buffer = torch.zeros_like(self.theta)
        self.t = 0

    def arrive(self, delta: Tensor) -> None:
        eps, beta, c, n = self.eps, self.beta, self.c, self.n
        self.buffer = self.buffer + delta
        if (self.t + 1) % n == 0:
            self.m = beta * self.m + self.buffer / n
            self.theta = self.theta - eps * ((1 - c * n + c) * beta * self.m + delta / n)
            self.buffer = torch.zeros_like(self.buffer)
        else:
            self.theta = self.theta - eps * (c * beta * self.m + delta / n)
        self.t += 1


@pytest.mark.parametrize("buffer", [1, 2, 3, 7])
@pytest.mark.parametrize("spread", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_delayed_nesterov_equals_transcription_for_random_arrivals(
    buffer: int, spread: float, momentum: float
) -> None:
    """Two buckets, whose differences arrive in turns that are drawn."""
    r = random.Random(buffer)
    torch.manual_seed(buffer)
    first = torch.randn(11)
    x = first.clone()
    outer = DelayedNesterov(x, 0.7, momentum, spread)
    buckets = cut(11, 1, 7 * 4e-6, 100.0).buckets
    assert len(buckets) == 2
    rules = [PaperRule(b.of(first), 0.7, momentum, spread / buffer, buffer) for b in buckets]
    for _ in range(6 * buffer + 1):
        which = r.randrange(2)
        delta = torch.randn(buckets[which].numel)
        outer.apply(buckets[which], buckets[which].of(x), -delta, 1 / buffer, buffer)
        rules[which].arrive(delta.double())
    expected = torch.cat([rule.theta for rule in rules]).float()
    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("buffer", [1, 4])
def test_n_differences_move_model_by_one_nesterov_step_along_their_mean(buffer: int) -> None:
    torch.manual_seed(0)
    (bucket,) = cut(9, 1, 1.0, 100.0).buckets
    x = torch.randn(9)
    parameter = nn.Parameter(x.clone())
    sgd = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    outer = DelayedNesterov(x, 0.7, 0.9, 0.0)
    for _ in range(5):
        deltas = torch.randn(buffer, 9)
        for delta in deltas:
            outer.apply(bucket, x, delta, 1 / buffer, buffer)
        parameter.grad = -deltas.mean(0)
        sgd.step()
        torch.testing.assert_close(x, parameter.data)


@pytest.mark.parametrize("spread", [0.25, 1.0])
def test_spread_momentum_moves_model_by_the_same_factors_in_total(spread: float) -> None:
    """Without new progress, N steps use the momentum once, of which the last one is newer."""
    (bucket,) = cut(1, 1, 1.0, 100.0).buckets
    x, one, zero = torch.zeros(1), torch.ones(1), torch.zeros(1)
    outer = DelayedNesterov(x, 1.0, 0.5, spread)
    for delta in (one, one, one, one):
        outer.apply(bucket, x, delta, 1 / 4, 4)
    before = x.item()
    for _ in range(4):
        outer.apply(bucket, x, zero, 1 / 4, 4)
    old = 3 / 4 * spread  # with m = 1, and the rest with m = 1/2
    assert x.item() - before == pytest.approx(0.5 * (old + (1 - old) * 0.5))


def test_outer_optimizer_keeps_its_state_when_servers_change() -> None:
    """Two servers become one, and one bucket of a lost server comes from its replica."""
    torch.manual_seed(1)
    layout = cut(12, 2, 4 * 4e-6, 6 * 4e-6)
    x = torch.randn(12)
    whole = DelayedNesterov(x, 0.7, 0.9, 0.0)
    servers = [DelayedNesterov(x, 0.7, 0.9, 0.0) for _ in range(2)]
    for _ in range(5):
        delta = torch.randn(12)
        for bucket in layout.buckets:
            for outer in (whole, servers[bucket.server]):
                outer.apply(bucket, bucket.of(x).clone(), bucket.of(delta), 1 / 3, 3)
    parts = [[bucket.part for bucket in layout.owned_by(server)] for server in range(2)]
    states = [outer.state_dict() for outer in servers]
    replicas = [servers[1].state_of(part) for part in parts[1]]
    joined = servers[0].joined([*states[:1], None], parts)
    for part, replica in zip(parts[1], replicas, strict=True):
        joined = servers[0].put_part(joined, replica, part, x)
    assert joined is not None and whole.velocity is not None and whole.pending is not None
    after = DelayedNesterov(x, 0.7, 0.9, 0.0)
    after.inherit(joined, [slice(0, 12)])
    assert after.velocity is not None and after.pending is not None
    assert torch.equal(after.velocity, whole.velocity) and whole.velocity.all()
    assert torch.equal(after.pending, whole.pending) and whole.pending.all()
    assert after.counts == {0: 2}


# -- the servers ---------------------------------------------------------------------------
class Arrival(NamedTuple):
    """A bucket of a difference at a server."""

    worker: int
    bucket: int
    values: Tensor
    notes: tuple[float, ...]
    buffer: int
    second: float


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Arrival]]:
    """Record what the servers apply."""
    result: list[Arrival] = []
    apply = AsyncDilocoServer._apply

    def recording(self: AsyncDilocoServer, arrival: ReceivedBucket) -> None:
        now = self.server.transport.now()
        values = arrival.values.clone()
        where = arrival.worker, arrival.bucket.index
        result.append(Arrival(*where, values, arrival.notes, self.buffer, now))
        apply(self, arrival)

    monkeypatch.setattr(AsyncDilocoServer, "_apply", recording)
    yield result


@pytest.mark.sample(2)
@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"steps": 3},
        {"steps": 4, "buffer": 2, "spread": 0.5, "outer_momentum": 0.5},
        {"steps": 5, "spread": 1.0, "outer_lr": 0.4, "grace": 1.0},
    ],
    ids=str,
)
def test_every_bucket_follows_the_rule_exactly(
    arrivals: list[Arrival], options: dict[str, Any], servers: int, segments: int
) -> None:
    job = Job("async-diloco", workers=4, servers=servers, numel=50, bucket=11, samples=900)
    job.cluster, job.slowdown, job.jitter = any_network(3, 4 + servers), {1: 3.0}, 0.3
    job.settings, job.segments = plain(**options), segments
    end = run(job)
    end.check_accounts()
    n = options.get("buffer", 4)
    eps, beta = options.get("outer_lr", 0.7), options.get("outer_momentum", 0.9)
    for bucket in job.layout.buckets:
        rule = PaperRule(bucket.of(end.first), eps, beta, options.get("spread", 0.0) / n, n)
        for each in arrivals:
            if each.bucket != bucket.index:
                continue
            if each.notes[0]:
                rule.arrive(-each.values.double())
            else:  # the rest of a segment
                rule.theta += each.values.double() / 4
        torch.testing.assert_close(bucket.of(end.model), rule.theta.float(), rtol=1e-4, atol=1e-5)
        assert rule.t > 20


def test_buckets_may_receive_the_same_differences_in_different_orders(
    arrivals: list[Arrival],
) -> None:
    """Links on which the buckets of several workers overtake each other."""
    job = Job("async-diloco", workers=4, servers=3, numel=50, bucket=11, samples=300)
    job.cluster, job.jitter, job.settings = any_network(10, 7), 0.3, plain(steps=3)
    run(job).check_accounts()
    orders: dict[int, list[int]] = defaultdict(list)
    for each in arrivals:
        orders[each.bucket].append(each.worker)
    assert len({tuple(sorted(order)) for order in orders.values()}) == 1
    assert len({tuple(order) for order in orders.values()}) > 1


def test_every_difference_is_applied_exactly_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without momentum, the model moves by the mean of what the workers have pushed."""
    moved: list[tuple[float, Tensor]] = []
    push = LocalDifference.push

    def recording(self: LocalDifference, *notes: float) -> None:
        moved.append((notes[0], self.x - self.base))
        push(self, *notes)

    monkeypatch.setattr(LocalDifference, "push", recording)
    job = Job("async-diloco", workers=3, servers=2, bucket=5, slowdown={1: 3.0}, samples=600)
    job.cluster = any_network(5, 5)
    job.settings = plain(steps=4, outer_momentum=0.0, grace=0.4)
    end = run(job)
    total = sum((0.7 if is_round else 1.0) * each for is_round, each in moved)
    torch.testing.assert_close(end.model - end.first, total / 3, rtol=1e-4, atol=1e-5)
    assert sum(is_round for is_round, _ in moved) > 20


@pytest.mark.parametrize("segments", [1, 3])
def test_one_worker_equals_diloco(segments: int) -> None:
    common = {"momentum": 0.9, "weight_decay": 0.01}
    ours = Job("async-diloco", workers=1, samples=300, segments=segments)
    ours.settings = {**common, "async_diloco": {"steps": 6}}
    theirs = Job("diloco", workers=1, samples=300, segments=segments)
    theirs.settings = {**common, "diloco": {"steps": 6}}
    torch.testing.assert_close(run(ours).model, run(theirs).model, rtol=1e-4, atol=1e-5)


def test_inner_optimizer_keeps_its_state_between_rounds() -> None:
    job = Job("async-diloco", workers=1, samples=300, servers=1)
    outer = {"steps": 7, "outer_lr": 1.0, "outer_momentum": 0.0}
    job.settings = {"momentum": 0.9, "weight_decay": 0.01, "async_diloco": outer}
    torch.testing.assert_close(run(job).model, single_process(job), rtol=1e-4, atol=1e-5)


def test_learning_rate_follows_samples_of_all_workers() -> None:
    seen: dict[int, list[tuple[int, float]]] = defaultdict(list)
    job = Job("async-diloco", workers=3, samples=900, slowdown={0: 6.0}, settings=plain(steps=4))
    job.schedule = lambda samples: 0.05 / (1 + samples)

    def probe(transport: Transport, role: Any, lease: SampleLease) -> None:
        seen[role.index].append((lease.start, role.worker.lr))

    job.probe = probe
    run(job)
    for steps in seen.values():
        assert all(lr == job.schedule(start) for start, lr in steps)
    start, _ = seen[0][-1]
    assert start > 800 and 4 * len(seen[0]) < 150  # own samples


# -- local steps ---------------------------------------------------------------------------
def test_local_steps_are_proportional_to_speed() -> None:
    plan = LocalSteps(4, 30, is_dynamic=True)
    assert plan.steps(2) == 30  # nothing is measured
    for worker, seconds in enumerate([0.1, 1.0, 0.25]):
        plan.record(worker, seconds, 1.0)
    assert [plan.steps(worker) for worker in range(4)] == [30, 3, 12, 30]
    plan.record(3, 100.0, 1.0)
    assert plan.steps(3) == 1
    plan.exclude(0)
    assert [plan.steps(worker) for worker in range(1, 4)] == [7, 30, 1]


def test_local_steps_do_not_depend_on_rounding_of_times() -> None:
    plan = LocalSteps(3, 30, is_dynamic=True)
    for worker, seconds in enumerate([0.09999999999999432, 0.2, 1.0]):
        plan.record(worker, seconds, 1.0)
    assert [plan.steps(worker) for worker in range(3)] == [30, 15, 3]


@pytest.mark.parametrize("mistake", [1e-12, 50.0])
def test_one_mistaken_measurement_changes_no_steps(mistake: float) -> None:
    plan = LocalSteps(3, 20, is_dynamic=True)
    times = [0.1, 0.1, 0.2]
    for rounds in range(12):
        for worker, seconds in enumerate(times):
            is_wrong = rounds == 6 and worker == 1
            plan.record(worker, mistake if is_wrong else seconds, 1.0)
            if rounds:
                assert [plan.steps(w) for w in range(3)] == [20, 20, 10]


def test_only_whole_rounds_have_a_weight() -> None:
    plan = LocalSteps(2, 8, is_dynamic=False)
    plan.record(0, 1.0, 32.0)
    plan.record(1, 1.0, None)  # the steps that a checkpoint left to send
    assert plan.mean_weight == 32.0
    plan.record(0, 1.0, None)
    assert plan.mean_weight == 32.0


def test_every_worker_takes_h_steps_without_dynamic_updates() -> None:
    plan = LocalSteps(2, 8, is_dynamic=False)
    plan.record(0, 0.1, 1.0)
    plan.record(1, 1.0, 1.0)
    assert [plan.steps(0), plan.steps(1)] == [8, 8]


@pytest.mark.sample(1)
@pytest.mark.parametrize("is_dynamic", [True, False])
def test_slow_worker_exchanges_as_often_only_with_dynamic_updates(
    arrivals: list[Arrival], is_dynamic: bool
) -> None:
    job = Job("async-diloco", workers=4, samples=8000, slowdown={2: 10.0})
    job.settings = plain(steps=20, dynamic=is_dynamic)
    end = run(job)
    pushes = [sum(each.worker == worker for each in arrivals) for worker in range(4)]
    steps = [20, 20, 2 if is_dynamic else 20, 20]
    assert end.servers[0].role.facts() == {"async_diloco": {"steps": steps}}
    # Its first round has H steps, as it has not been measured.
    assert pushes[2] == pytest.approx(pushes[0] - 9 if is_dynamic else pushes[0] / 10, abs=1.5)


def test_fast_workers_do_not_wait_for_a_slow_one() -> None:
    waiting: dict[str, dict[int, list[float]]] = {}
    for algorithm in ("async-diloco", "diloco"):
        waited = waiting[algorithm] = defaultdict(list)
        job = Job(algorithm, workers=4, samples=4000, slowdown={3: 10.0}, settings=PLAIN)

        def probe(
            transport: Transport, role: Any, lease: SampleLease, waited: Any = waited
        ) -> None:
            waited[role.index].append(transport.traffic.waiting)

        job.probe = probe
        run(job)
    for worker in range(3):
        times = waiting["async-diloco"][worker]
        assert len(times) > 300
        assert times[-1] == pytest.approx(times[3], abs=1e-6)  # the first leases take time
        assert waiting["diloco"][worker][-1] > 1000


# -- grace periods -------------------------------------------------------------------------
class Answers:
    """A grace period on a clock that the test sets."""

    def __init__(self, workers: int, seconds: float) -> None:
        self.now = 0.0
        self.sent: list[tuple[float, int, int]] = []
        self.grace = GracePeriod(workers, seconds, lambda: self.now, self._send)
        self.buckets = [Bucket(0, 0, 5, 0), Bucket(1, 5, 9, 0)]

    def _send(self, worker: int, bucket: Bucket) -> None:
        self.sent.append((self.now, worker, bucket.index))

    def hold(self, second: float, worker: int, bucket: int) -> None:
        self.now = second
        self.grace.due()
        self.grace.hold(worker, self.buckets[bucket])


def test_answers_are_sent_together_after_the_grace_period() -> None:
    answers = Answers(4, 2.0)
    assert answers.grace.due() is None
    answers.hold(1.0, 0, 0)
    answers.hold(1.5, 0, 1)
    answers.hold(2.0, 2, 0)
    assert answers.grace.due() == 1.0 and not answers.sent
    answers.now = 3.0
    assert answers.grace.due() == 0.5
    answers.now = 3.5
    assert answers.grace.due() is None
    assert answers.sent == [(3.0, 0, 0), (3.0, 2, 0), (3.5, 0, 1)]


def test_grace_period_ends_early_if_all_workers_wait_or_one_ends() -> None:
    answers = Answers(2, 100.0)
    answers.hold(1.0, 1, 0)
    answers.hold(2.0, 0, 0)
    assert answers.sent == [(2.0, 1, 0), (2.0, 0, 0)]
    answers.hold(3.0, 1, 1)
    answers.grace.ended(0)
    assert answers.sent[2:] == [(3.0, 1, 1)]
    answers.hold(4.0, 1, 0)  # the only running worker
    assert answers.sent[3:] == [(4.0, 1, 0)]


def test_without_grace_answers_are_sent_at_once() -> None:
    answers = Answers(3, 0.0)
    answers.hold(1.0, 1, 0)
    assert answers.sent == [(1.0, 1, 0)]


@pytest.mark.parametrize("grace", [0.0, 1.7])
def test_answers_after_grace_contain_all_differences_of_the_period(
    arrivals: list[Arrival], monkeypatch: pytest.MonkeyPatch, grace: float
) -> None:
    """Workers whose rounds end one second apart; no answer takes longer than the limit."""
    sent: list[tuple[float, int, int]] = []
    answer = AsyncDilocoServer.answer

    def recording(self: AsyncDilocoServer, worker: int, bucket: Bucket) -> None:
        sent.append((self.server.transport.now(), worker, len(arrivals)))
        answer(self, worker, bucket)

    monkeypatch.setattr(AsyncDilocoServer, "answer", recording)
    job = Job("async-diloco", workers=3, samples=600, slowdown={1: 1.1, 2: 1.2})
    job.settings = plain(steps=10, grace=grace, dynamic=False)
    run(job).check_accounts()
    first, second, third = sent[:3]
    if grace:
        assert [each[0] for each in sent[:3]] == pytest.approx([11.7, 11.7, 13.7], abs=0.01)
        assert (first[1:], second[1:], third[1:]) == ((0, 2), (1, 2), (2, 3))
    else:
        assert [each[0] for each in sent[:3]] == pytest.approx([10, 11, 12], abs=0.01)
        assert [each[2] for each in sent[:3]] == [1, 2, 3]
    for worker in range(3):
        ends = [second for second, who, _ in sent if who == worker]
        starts = [each.second for each in arrivals if each.worker == worker]
        assert len(ends) == len(starts)
        assert all(0 <= b - a <= grace + 1e-9 for a, b in zip(starts, ends, strict=True))


# -- weights -------------------------------------------------------------------------------
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("weights", "batch"), [("equal", 0), ("samples", 1), ("samples-per-step", 4)]
)
def test_differences_are_weighted_relative_to_the_mean(
    arrivals: list[Arrival], weights: str, batch: int
) -> None:
    """A slow worker takes 3 steps a round, the others 12."""
    job = Job("async-diloco", workers=3, samples=3000, slowdown={0: 4.0})
    job.settings = plain(steps=12, weights=weights)
    run(job).check_accounts()
    last = {each.worker: each.notes for each in arrivals if each.notes[0]}
    factors = [last[worker][3] for worker in range(3)]
    by_samples = [1 / 3, 4 / 3, 4 / 3]
    assert factors == pytest.approx([1.0] * 3 if weights == "equal" else by_samples)
    if batch:
        assert [last[worker][2] for worker in range(3)] == [12 * batch, 48 * batch, 48 * batch]


def test_weights_scale_the_differences(arrivals: list[Arrival]) -> None:
    job = Job("async-diloco", workers=3, samples=3000, slowdown={0: 4.0})
    job.settings = plain(steps=12, weights="samples", outer_momentum=0.0)
    end = run(job)
    factors = [0.7 * each.notes[3] if each.notes[0] else 1.0 for each in arrivals]
    values = torch.stack([each.values for each in arrivals])
    moved = (torch.tensor(factors).unsqueeze(1) * values).sum(0)
    torch.testing.assert_close(end.model - end.first, moved / 3, rtol=1e-4, atol=1e-5)


# -- failures ------------------------------------------------------------------------------
@pytest.mark.parametrize("buffer", ["auto", 4])
def test_automatic_buffer_shrinks_with_the_surviving_workers(
    arrivals: list[Arrival], buffer: int | str
) -> None:
    job = Job("async-diloco", workers=4, samples=1600, settings=plain(steps=5, buffer=buffer))
    job.cluster = network(**{**job.cluster.model_dump(), "failures": {3: 42.5}})
    end = run(job)
    assert end.ranks[3] is None and len(end.workers) == 3
    sizes = {each.second < 42.5: each.buffer for each in arrivals}
    assert sizes == {True: 4, False: 3 if buffer == "auto" else 4}
    assert {each.worker for each in arrivals if each.second > 43} == {0, 1, 3}


def test_failure_of_the_fastest_worker_gives_the_others_all_steps() -> None:
    job = Job("async-diloco", workers=3, samples=2400, slowdown={1: 2.0, 2: 2.0})
    job.settings = plain(steps=10)
    job.cluster = network(**{**job.cluster.model_dump(), "failures": {1: 100.0}})
    facts = run(job).servers[0].role.facts()
    assert facts["async_diloco"]["steps"][1:] == [10, 10]


# -- all together --------------------------------------------------------------------------
def draw_options(r: random.Random) -> dict[str, Any]:
    return {
        "steps": r.randint(1, 9),
        "dynamic": r.random() < 0.7,
        "buffer": r.choice(["auto", 1, 3]),
        "spread": r.choice([0.0, 0.5, 1.0]),
        "outer_momentum": r.choice([0.0, 0.5]),
        "grace": r.choice([0.0, 0.3, 5.0, 1e4]),
        "weights": r.choice(["equal", "samples", "samples-per-step"]),
    }


@pytest.mark.parametrize("seed", range(32))
def test_async_diloco_counters_balance_under_any_conditions(seed: int) -> None:
    job = any_served_job("async-diloco", seed, lambda r: {})
    del job.settings["async-diloco"]
    job.settings["async_diloco"] = draw_options(random.Random(seed))
    run(job).check_accounts()


@pytest.mark.long
@pytest.mark.sample(1)
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_async_diloco_converges_to_minimum(wire: str) -> None:
    job = Job("async-diloco", workers=4, servers=2, bucket=5, slowdown={0: 3.0}, samples=6000)
    job.noise, job.settings = 0.0, {**plain(steps=4, outer_momentum=0.5), "wire": wire}
    check_converges(job)


def test_worker_keeps_its_local_steps_in_the_next_segment() -> None:
    job = Job("async-diloco", workers=2, samples=2000, segments=4, slowdown={0: 5.0})
    job.settings = plain(steps=10)
    end = run(job)
    roles: list[Any] = [worker.role for worker in end.workers]
    assert all(isinstance(role, AsyncDilocoWorker) for role in roles)
    assert [role.steps for role in roles] == [2, 10]


# -- the commands ----------------------------------------------------------------------------
@pytest.mark.sample(1)
@pytest.mark.parametrize("grace", [0, 0.05])
def test_async_diloco_resumed_run_is_bit_identical(tmp_path: Path, grace: float) -> None:
    options = ["--async-diloco-steps", 4, "--async-diloco-grace", grace]
    check_resumed(tmp_path, "async-diloco", *options, "--async-diloco-spread", 0.5)


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2))])
def test_async_diloco_learns_digits_with_a_slow_worker(tmp_path: Path, seed: int) -> None:
    plan = ["--algorithm", "async-diloco", "--workers", 4, "--epochs", 10, "--seed", seed]
    plan += ["--slowdown", "0=10", "--async-diloco-steps", 10, "--quiet"]
    end = start(*plan, "--run-dir", tmp_path / "run")
    assert end["test_accuracy"] > 0.9
    assert end["wait_fraction"] < 0.01
    assert end["gradients_applied"] == end["gradients_computed"]
    assert end["async_diloco"]["steps"] == [1, 10, 10, 10]


@pytest.mark.slow
@needs("openmpi")
def test_async_diloco_trains_over_mpi(tmp_path: Path) -> None:
    plan = ["--epochs", 6, "--slowdown", "0=4", "--compute", "real", "--bucket-mb", 0.005]
    plan += ["--async-diloco-steps", 8, "--async-diloco-grace", 0.002, "--wire", "bf16"]
    train(4, tmp_path, "--algorithm", "async-diloco", *plan)
    end = summary(tmp_path)
    assert end["samples"] == 6 * 1437
    assert end["gradients_applied"] == end["gradients_computed"]
    assert end["test_accuracy"] > 0.75
    assert 1 <= end["async_diloco"]["steps"][0] <= 8
