"""aladdin-ahead: comparison with a reference implementation, guarantees and counters."""

from __future__ import annotations

import copy
import heapq
import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from aladdin_mpi.algorithms.aladdin_ahead import AheadServer, AheadWorker, levels
from aladdin_mpi.control.budget import SampleLease
from aladdin_mpi.errors import UserError
from aladdin_mpi.exchange.global_model import MOST_ENCODED, MOST_VECTORS, GlobalModelPredictor
from aladdin_mpi.exchange.model_requests import (
    MOMENTS,
    CompressionController,
    Level,
    ModelRequestScheduler,
    fine_layout,
)
from aladdin_mpi.exchange.worker_mailbox import Sent
from aladdin_mpi.flat.replica import PhantomReplica
from aladdin_mpi.options.algorithms import AladdinAheadOptions, own
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.options.general import FORWARD_SHARE
from aladdin_mpi.options.run import RunOptions, SimulateOptions, parse
from aladdin_mpi.run.trainer import simulate
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.worker.role import Role
from tests.quadratic import Quadratic, noise_of
from tests.roles import Job, Outcome, any_network, flat_start, run

Vector = NDArray[np.float64]

NAME = "aladdin-ahead"
SPREAD = {0: 1.0, 1: 1.0137, 2: 1.0291, 3: 1.0473}
"""Slowdown factors chosen so that no two workers ever act at the same time."""
SEEDS = 500 if int(os.environ.get("ALADDIN_MPI_SCHEDULES", "20")) >= 500 else 200
GROUP = 20
"""Seeds of a test; workers fail in more than a tenth of the runs."""
BEGIN, SEND, END = 0, 1, 2


def job(**changes: Any) -> Job:
    own = {"sync_rounds": 0, **changes.pop("own", {})}
    settings = {"weight_decay": 0.01, "momentum": 0.8, "wire": "fp32"}
    settings = {"aladdin_ahead": own, **changes.pop("settings", settings)}
    return replace(Job(NAME, bucket=4, slowdown=SPREAD, settings=settings), **changes)


# -- reference implementation as a plain list of events ---------------------------------------


class PlainBucket:
    """The rule for one bucket of one worker: x, V, M and the steps not yet in any model."""

    def __init__(self, x: Vector, n: int, m: float, w: float | None, ahead: float) -> None:
        self.x, self.model, self.velocity = x.copy(), x.copy(), np.zeros_like(x)
        self.n, self.m, self.w = n, m, w
        self.v = np.zeros_like(x)
        self.k = m * (1 - m**ahead) / (1 - m)
        if ahead == int(ahead):
            assert np.isclose(self.k, sum(m**i for i in range(1, int(ahead) + 1)))
        self.count = self.own = 0
        self.age = 1.0
        self.steps: list[tuple[int, int, Vector]] = []

    @property
    def point(self) -> Vector:
        return self.x - self.k * self.velocity

    @property
    def weight(self) -> float:
        return float(np.clip(self.age / 2, 0.5, 1)) if self.w is None else self.w

    def move(self, u: Vector) -> None:
        self.velocity = self.m * self.velocity + self.weight * u
        self.x = self.x - self.velocity

    def step(self, number: int, base: int, g: Vector, lr: float) -> Vector:
        """Apply one of the worker's gradients, with weight decay; return what is sent."""
        self.v = self.m * self.v + g
        self.steps.append((number, base, lr * g))
        self.move(lr * g)
        return lr * self.v

    def read(self, model: Vector, count: int, own: int, before: int) -> None:
        for number, base, _ in self.steps:
            if number == own > self.own:
                self.age += 0.1 * ((before - base) / self.n - self.age)
        self.steps = [step for step in self.steps if step[0] > own]
        self.own = own
        if count > self.count:
            self.velocity = (self.model - model) * self.n / (count - self.count)
        self.model, self.count, self.x = model, count, model
        for _, _, u in self.steps:
            self.move(u)


class Plain:
    """All workers and one server, without messages."""

    def __init__(self, job: Job) -> None:
        self.job, self.n = job, job.workers
        options = own(job.options, AladdinAheadOptions)
        weight = None if isinstance(options.weight, str) else options.weight
        self.pi = 1 if isinstance(options.pi, str) else options.pi
        self.share = None if isinstance(options.send, str) else options.send
        ahead = 1.0 if isinstance(options.lookahead, str) else options.lookahead
        self.parts = [bucket.part for bucket in job.layout.buckets]
        first = flat_start(job.numel).double().numpy()
        problem = Quadratic(job.numel)
        self.scale, self.optimum = problem.scale.double().numpy(), problem.optimum.double().numpy()
        self.model = first.copy()
        self.count = [0] * len(self.parts)
        m = job.options.momentum
        self.workers = [
            [PlainBucket(first[part], self.n, m, weight, ahead) for part in self.parts]
            for _ in range(self.n)
        ]
        self.own = [[0] * len(self.parts) for _ in range(self.n)]
        self.before = [[0] * len(self.parts) for _ in range(self.n)]
        self.during = [[0] * len(self.parts) for _ in range(self.n)]
        self.f = [0.5 if self.share is None else self.share] * self.n
        self.rise = [0.05] * self.n
        self.asked = list(self.f)
        self.inbox: list[list[tuple[float, int, tuple[Any, ...]]]] = [[] for _ in range(self.n)]
        self.steps = [0] * self.n
        self.base = [[0] * len(self.parts) for _ in range(self.n)]
        self.gradient = [first * 0 for _ in range(self.n)]

    def run(self) -> Plain:
        left = self.job.samples // self.job.batch
        events = [(1e-6 * (i + 2), BEGIN, i, 0) for i in range(self.n)]
        heapq.heapify(events)
        while events:
            now, kind, i, b = heapq.heappop(events)
            if kind == BEGIN and left:
                left -= 1
                self.begin(i)
                d = self.job.slowdown[i]
                for number, part in enumerate(self.parts):
                    share = FORWARD_SHARE + (1 - FORWARD_SHARE) * part.stop / self.job.numel
                    heapq.heappush(events, (now + d * share, SEND, i, number))
                heapq.heappush(events, (now + d, END, i, 0))
            elif kind == SEND:
                self.send(i, b, now)
            elif kind == END:
                self.read(i, now)
                heapq.heappush(events, (now, BEGIN, i, 0))
        for i in range(self.n):
            self.read(i, float("inf"))
        return self

    def begin(self, i: int) -> None:
        self.asked[i] = self.f[i]
        p = np.concatenate([bucket.point for bucket in self.workers[i]])
        each = [
            noise_of(i, self.steps[i] * self.job.batch + s, self.job.numel, self.job.noise)
            for s in range(self.job.batch)
        ]
        noise = torch.stack(each).mean(0).double().numpy()
        decay = self.job.options.weight_decay
        self.gradient[i] = self.scale * (p - self.optimum) + noise + decay * p
        self.base[i] = [bucket.count for bucket in self.workers[i]]
        self.steps[i] += 1

    def send(self, i: int, b: int, now: float) -> None:
        part, lr = self.parts[b], self.job.schedule(0)
        step = self.workers[i][b].step(self.steps[i], self.base[i][b], self.gradient[i][part], lr)
        self.model[part] -= step / self.n
        self.before[i][b] = self.count[b]
        self.count[b] += 1
        self.own[i][b] += 1
        due = self.own[i][b] % self.pi == 0
        if due and b == max(1, ceil(self.asked[i] * len(self.parts))) - 1:
            for each, place in enumerate(self.parts):
                self.during[i][each] = self.own[i][b]
                told = (self.count[each], self.own[i][each], self.before[i][each])
                self.inbox[i].append((now, each, (self.model[place].copy(), *told)))

    def read(self, i: int, now: float) -> None:
        here = [message for message in self.inbox[i] if message[0] < now]
        self.inbox[i] = [message for message in self.inbox[i] if message[0] >= now]
        newest = {b: told for _, b, told in here}
        for b, told in newest.items():
            self.workers[i][b].read(*told)
        due = self.steps[i] % self.pi == 0
        if due and self.share is None and now < float("inf"):
            timely = [b for b in newest if self.during[i][b] == self.steps[i]]
            late = 1 - len(timely) / len(self.parts)
            if late:
                self.rise[i] = 0.01
            step = self.rise[i] * (1 - late) - 0.2 * late
            self.f[i] = float(np.clip(self.f[i] + step, 0, 1))

    @property
    def locals(self) -> Tensor:
        rows = [np.concatenate([bucket.point for bucket in worker]) for worker in self.workers]
        return torch.tensor(np.stack(rows)).float()


OWN: list[dict[str, Any]] = [
    {"weight": weight, "lookahead": lookahead, "send": send}
    for weight, lookahead, send in product((0.5, 1.0), (0.0, 0.5, 2.0), (0.0, 0.7, 1.0))
]


PI = [{"pi": 3}, {"pi": 2, "weight": 1.0, "lookahead": 1.0, "send": 0.5}]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "own",
    [
        *({}, *PI),
        *(pytest.param(own, marks=[pytest.mark.long] * (n % 3 > 0)) for n, own in enumerate(OWN)),
    ],
    ids=str,
)
def test_aladdin_ahead_matches_reference_implementation(own: dict[str, Any]) -> None:
    case = job(own=own, samples=400)
    check(case)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("workers", "bucket", "momentum"), [(1, 17, 0.9), (3, 2, 0.0), (4, 5, 0.5)]
)
def test_aladdin_ahead_matches_reference_implementation_for_any_size(
    workers: int, bucket: int, momentum: float
) -> None:
    settings = {"weight_decay": 0.0, "momentum": momentum, "wire": "fp32"}
    check(job(workers=workers, bucket=bucket, settings=settings, samples=100 * workers))


def check(case: Job) -> None:
    end, plain = run(case), Plain(case).run()
    end.check_accounts()
    torch.testing.assert_close(end.model, torch.tensor(plain.model).float(), rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(end.locals, plain.locals, rtol=2e-4, atol=2e-4)


@pytest.mark.long
def test_aladdin_ahead_reference_variants_differ_by_more_than_tolerance() -> None:
    """Without a difference, the previous test could not distinguish the variants."""
    models = [Plain(job(own=own, samples=400)).run().locals for own in OWN]
    for a, b in pairwise(models):
        assert not torch.allclose(a, b, rtol=1e-3, atol=1e-3)


# -- consequences of the rule -----------------------------------------------------------------


def worker_of(end: Outcome, index: int = 0) -> AheadWorker:
    role = end.workers[index].role
    assert isinstance(role, AheadWorker)
    return role


def track_x(role: AheadWorker) -> Tensor:
    """``x = p + k V``."""
    x = role.x.clone()
    for bucket in role.worker.layout.buckets:
        part = bucket.part
        x[part] += role.track.k * role.track.velocity[part]
    return x


def test_aladdin_ahead_single_worker_has_global_model() -> None:
    end = run(job(workers=1, bucket=17, own={"send": 1.0}))
    role = worker_of(end)
    assert all(own == 50 for own in role.track.own)
    torch.testing.assert_close(track_x(role), end.model, rtol=1e-6, atol=1e-6)


def test_aladdin_ahead_single_worker_predicts_model_despite_late_models() -> None:
    """With n = 1 and w = 1, the worker's recursion is the server's, however late models are."""
    slow = Cluster.model_validate({"hosts": 2, "latency_us": 4e5})
    end = run(job(workers=1, own={"pi": 1, "weight": 1.0, "send": 0.0}, cluster=slow))
    role = worker_of(end)
    assert min(role.track.own) < 50
    torch.testing.assert_close(track_x(role), end.model, rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_aladdin_ahead_velocity_matches_linear_drift() -> None:
    """With constant gradients, all workers together move by lr g / (1 - m) in a round."""
    lr, m = 1e-5, 0.8
    settings = {"weight_decay": 0.0, "momentum": m}
    case = job(settings=settings, schedule=lambda samples: lr, noise=0.0, samples=1600)
    end = run(case)
    problem = Quadratic(case.numel)
    drift = lr * problem.scale * (end.first - problem.optimum) / (1 - m)
    for index in range(case.workers):
        torch.testing.assert_close(
            worker_of(end, index).track.velocity.float(), drift, rtol=0.15, atol=1e-6
        )


@pytest.mark.long
def test_aladdin_ahead_converges_where_aladdin_diverges() -> None:
    """A curvature h with lr h = 0.3 and 16 workers: late models and momentum 0.9."""
    settings: dict[str, Any] = {"weight_decay": 0.0, "momentum": 0.9}
    case = Job(
        NAME,
        workers=16,
        bucket=9,
        samples=16 * 4 * 100,
        schedule=lambda samples: 0.3,
        noise=0.0,
        jitter=0.05,
        settings=settings,
    )
    ahead = run(case)
    diverging = run(replace(case, algorithm="aladdin", settings={**settings, "aladdin": {"pi": 1}}))
    optimum = Quadratic(17).optimum
    before = float((ahead.first - optimum).norm())
    assert float((ahead.model - optimum).norm()) < 0.02 * before
    assert not float((diverging.model - optimum).norm()) < 10 * before


@pytest.mark.long
@pytest.mark.parametrize("slow", [2.0, 10.0])
def test_aladdin_ahead_straggler_neither_blocks_nor_destabilises(slow: float) -> None:
    settings = {"weight_decay": 0.0, "momentum": 0.9}
    case = Job(
        NAME,
        workers=8,
        bucket=4,
        samples=8 * 4 * 120,
        schedule=lambda samples: 0.2,
        noise=0.0,
        jitter=0.05,
        slowdown={0: slow},
        settings=settings,
    )
    end = run(case)
    end.check_accounts()
    steps = [len(worker.leases) for worker in end.workers]
    assert min(steps[1:]) > (slow - 1) * steps[0] * 0.9
    assert float((end.model - Quadratic(17).optimum).norm()) < 0.05
    assert all(worker.traffic.waiting < 2.5 * slow + 0.5 for worker in end.workers)  # at the end


# -- first rounds -----------------------------------------------------------------------------


def nesterov(case: Job, first: Tensor, rounds: int, lr: float, m: float) -> Tensor:
    """Return the model after steps of a single process, with gradients without noise."""
    problem = Quadratic(case.numel)
    x, velocity = first.clone(), torch.zeros_like(first)
    for _ in range(rounds):
        velocity = m * velocity + lr * problem.scale * (x - m * velocity - problem.optimum)
        x = x - velocity
    return x


@pytest.mark.sample(1)
@pytest.mark.parametrize("servers", [1, 3])
def test_aladdin_ahead_first_rounds_are_synchronous(servers: int) -> None:
    settings = {"weight_decay": 0.0, "momentum": 0.8}
    models = []
    for rounds in (12, 0):
        case = job(
            settings={**settings, "wire": "fp32", "aladdin_ahead": {"sync_rounds": rounds}},
            servers=servers,
            samples=12 * 4 * 4,
            schedule=lambda samples: 0.2,
            noise=0.0,
            jitter=0.2,
        )
        end = run(case)
        models.append(end.model)
    expected = nesterov(case, end.first, 12, 0.2, 0.8)
    torch.testing.assert_close(models[0], expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(models[1], expected, rtol=1e-2, atol=1e-2)


def test_aladdin_ahead_slow_worker_delays_others_by_one_step_per_first_round() -> None:
    begins: dict[int, list[float]] = {}

    def note(transport: Transport, role: Role, lease: SampleLease) -> None:
        begins.setdefault(transport.rank - 1, []).append(transport.now())

    run(job(own={"sync_rounds": 5}, slowdown={0: 50.0}, samples=400, probe=note))
    for index in (1, 2, 3):
        steps = [after - before for before, after in pairwise(begins[index])]
        assert steps[0] == pytest.approx(2.0, abs=0.1)
        assert max(steps) < 2.1 and max(steps[7:]) < 1.1


# -- just in time -----------------------------------------------------------------------------


@pytest.mark.long
def test_aladdin_ahead_models_are_sent_just_in_time() -> None:
    """Without network delays, at the last bucket's moment; on a slow network, earlier."""
    shares, ages = [], []
    for latency in (0.0, 1e5, 3e5):
        cluster = Cluster.model_validate(
            {"hosts": 5, "latency_us": latency, "message_overhead_us": 0, "bandwidth_gbit": 1e9}
        )
        end = run(job(samples=1600, bucket=1, jitter=0.02, slowdown={}, cluster=cluster))
        shares.append(worker_of(end).timing.shares[0])
        ages.append(worker_of(end).track.mean_age)
        assert worker_of(end).timing.late < 0.2
    assert shares[0] > shares[1] > shares[2] > 0, shares
    assert ages[0] < ages[1] < ages[2] < 2


@pytest.mark.parametrize("servers", [1, 4, 16])
def test_fine_layout_distributes_each_server_over_backward_pass(servers: int) -> None:
    options = RunOptions(servers=servers, bucket_mb=4.0, shard_mb=16.0)
    layout = fine_layout(PhantomReplica(25_000_000), 8, options)
    for server in range(servers):
        own = layout.owned_by(server)
        assert len(own) >= MOMENTS
        assert own[0].stop < layout.numel / 6 and own[-1].start > layout.numel * 5 / 6
    sizes = [sum(b.numel for b in layout.owned_by(server)) for server in range(servers)]
    assert max(sizes) - min(sizes) <= 2 * len(layout.buckets)


def test_timing_share_rises_fast_until_model_is_late() -> None:
    timing = ModelRequestScheduler([1])
    timing.note(0, 0, during=1)
    timing.end_step(1)
    assert timing.shares == [pytest.approx(0.55)]
    timing.end_step(2)  # late
    timing.note(0, 0, during=3)
    saved = copy.deepcopy(timing.state_dict())
    timing.end_step(3)
    assert timing.shares == [pytest.approx(0.36)]
    other = ModelRequestScheduler([1])
    other.load_state_dict(saved)
    other.note(0, 0, during=3)
    other.end_step(3)
    assert other.shares == timing.shares


def test_timing_share_falls_for_late_and_rises_for_timely_models() -> None:
    timing = ModelRequestScheduler([4, 2])
    for bucket in range(4):
        timing.note(0, bucket, during=1)
    timing.note(1, 0, during=0)
    assert timing.end_step(1) == pytest.approx(2 / 6)
    assert timing.shares[0] > 0.5 > timing.shares[1]
    for number in range(2, 20):
        timing.end_step(number)
    assert timing.shares == [0.0, 0.0]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("wire", "most"), [("fp32", MOST_VECTORS), ("int8", MOST_ENCODED)])
def test_aladdin_ahead_keeps_bounded_number_of_messages(wire: str, most: int) -> None:
    """Models arrive many steps late; memory stays within the bound and no gradient is lost."""
    slow = Cluster.model_validate({"hosts": 5, "latency_us": 6.7e6})
    settings = {"weight_decay": 0.01, "momentum": 0.8, "wire": wire}
    end = run(job(samples=800, numel=60, bucket=20, cluster=slow, settings=settings))
    end.check_accounts()
    for index in range(4):
        outbox, track = worker_of(end, index).link.outbox, worker_of(end, index).track
        assert len(outbox._kept) == most
        assert len(outbox._kept) + len(outbox._free) <= most + 4  # the ring, and two others
        assert track.mean_age > 3
        vectors = {each.vector.data_ptr() for each in [*outbox._kept, *outbox._free]}
        assert (len(vectors) == 1) == (wire == "int8")


def test_aladdin_ahead_with_late_models_finishes_at_rate_of_zero() -> None:
    slow = Cluster.model_validate({"hosts": 5, "latency_us": 6.7e6})
    end = run(job(samples=400, cluster=slow, schedule=lambda samples: 0.1 * (samples < 200)))
    end.check_accounts()
    assert torch.isfinite(end.model).all()


# -- counters ---------------------------------------------------------------------------------


def any_job(seed: int) -> Job:
    """Return a random run with delays, narrow links, pauses, failures and segments."""
    r = random.Random(f"{NAME} {seed}")
    workers, servers = r.randint(1, 5), r.randint(1, 2)
    servers = min(servers, workers)
    steps = r.choice([1, 3, 6])
    network = any_network(seed, servers + workers).model_dump()
    failing = r.sample(range(servers, servers + workers), r.randint(0, workers - 1))
    failing = failing if seed % 2 else []
    failures = {rank: r.uniform(0.0, 1.3 * steps) for rank in failing}
    return Job(
        NAME,
        workers=workers,
        servers=servers,
        samples=4 * workers * steps + r.randint(0, 3),
        segments=r.randint(1, 3),
        bucket=r.choice([2, 5, 17]),
        settings={
            "weight_decay": 0.0,
            "momentum": r.choice([0.0, 0.9]),
            "aladdin_ahead": {"sync_rounds": seed % 3},
        },
        slowdown={r.randrange(workers): r.choice([1.0, 3.0])},
        jitter=0.3,
        cluster=Cluster(**{**network, "failures": failures}),
        seed=seed,
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("group", range(SEEDS // GROUP))
def test_aladdin_ahead_counters_balance_under_any_conditions(group: int) -> None:
    with_failures = 0
    for seed in range(group * GROUP, (group + 1) * GROUP):
        case = any_job(seed)
        end = run(case)
        if len(end.workers) == case.workers:
            end.check_accounts()
            continue
        with_failures += 1
        computed = sum(worker.role.counts()["computed"] for worker in end.workers)
        for server in end.servers:
            counts = server.role.counts()
            assert counts["applied"] - counts.get("from_failed", 0) == computed, seed
    assert with_failures > GROUP / 10


def test_aladdin_ahead_server_only_adds_steps() -> None:
    """x~ is the initial model minus the mean of all steps: no gradient counts twice."""
    case = job(schedule=lambda samples: 0.0, samples=64)
    end = run(case)
    assert torch.equal(end.model, end.first)
    role = end.servers[0].role
    assert isinstance(role, AheadServer)
    assert set(role.applied.values()) == {16}


def test_aladdin_ahead_clips_evenly_spread_gradient_as_a_whole() -> None:
    """Buckets of n values are clipped to clip * sqrt(n / all values), so together to clip."""
    settings = {"weight_decay": 0.0, "momentum": 0.0, "wire": "fp32", "clip": 2.0}
    case = job(settings=settings, samples=160, spoil=lambda worker, step: 1e6)
    end = run(case)
    assert len(case.layout.buckets) > 3
    rounds = 160 / case.batch / case.workers
    moved = rounds * case.schedule(0) * 2.0 / case.numel**0.5
    torch.testing.assert_close(end.first - end.model, torch.full((case.numel,), moved))


@pytest.mark.parametrize("own", range(8))
@pytest.mark.parametrize("oldest", [1, 3])
def test_aladdin_ahead_repeats_own_messages_as_their_steps_one_by_one(
    own: int, oldest: int
) -> None:
    """Some messages hold several steps; the first ones may not be kept any more."""
    track = worker_of(run(job(workers=1, samples=4))).track
    sent = _kept_messages(track, [1, 1, 3, 1, 2], oldest)
    bucket = track.worker.layout.buckets[1]
    now = torch.randn(bucket.numel)
    m, w, velocity = 0.8, track.weight(bucket), bucket.of(track.velocity).clone()
    before = [lump for lump in sent if lump.last <= own][-1:]
    after = [lump for lump in sent if lump.last > own]
    if not before and after and after[0].first > own + 1:
        before, after = after[:1], after[1:]
    step = bucket.of(before[0].vector) / before[0].count if before else 0.0
    x = now.clone()
    for lump in after:
        for _ in range(lump.count):
            former, step = step, bucket.of(lump.vector) / lump.count
            velocity = m * velocity + w * (step - m * former)
            x = x - velocity
    track.rebase(bucket, now, track.count[bucket.index], own, 0)
    expected = x - track.k * velocity
    torch.testing.assert_close(bucket.of(track.velocity), velocity, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(bucket.of(track.x), expected, rtol=1e-4, atol=1e-4)


def _kept_messages(track: GlobalModelPredictor, counts: list[int], oldest: int) -> list[Sent]:
    """Let the outbox keep messages with random values and these numbers of steps."""
    outbox = track.outbox
    outbox._kept.clear()
    number = oldest
    for count in counts:
        sent = Sent(torch.randn(track.x.numel()), [])
        sent.count, sent.first, sent.last = count, number, number + count - 1
        number += count
        outbox._kept.append(sent)
    return list(outbox._kept)


# -- headroom ---------------------------------------------------------------------------------

LEVELS = (Level(8, 1), Level(4, 1), Level(4, 2))


def steps(
    room: CompressionController, measure: Callable[[Level], float], count: int
) -> list[Level]:
    """Return the levels chosen if gradients are younger the larger the measure is."""
    result = []
    for _ in range(count):
        now = measure(room.level)
        result.append(room.end_step(now, 1 - now))
    return result


def test_headroom_keeps_effective_level_and_reverts_on_unsaturated_links() -> None:
    room = CompressionController(LEVELS)
    assert steps(room, lambda level: 0.2 if level.bits == 8 else 0.6, 500)[-1] == Level(4, 1)
    assert steps(room, lambda level: 0.9, 500)[-1] == Level(8, 1)


def test_headroom_retries_ineffective_level_with_growing_interval() -> None:
    """As if latency were the bottleneck rather than the number of bytes."""
    room = CompressionController(LEVELS)
    seen = steps(room, lambda level: 0.1, 9000)
    tried = [i for i, (a, b) in enumerate(pairwise(seen)) if (a, b) == LEVELS[:2]]
    pauses = [b - a for a, b in pairwise(tried)]
    assert pauses == sorted(pauses)
    assert len(tried) > 3
    assert pauses[-1] > 5 * pauses[0]
    assert seen.count(LEVELS[0]) > 0.85 * len(seen)
    assert LEVELS[2] not in seen


def test_headroom_tries_next_level_if_first_shows_no_effect() -> None:
    """As on links that are still saturated at the first level."""
    room = CompressionController(LEVELS)
    assert steps(room, lambda level: 0.5 if level.pi > 1 else -0.9, 300)[-1] == Level(4, 2)
    hopeless = steps(CompressionController(LEVELS), lambda level: -0.9, 9000)
    assert LEVELS[2] in hopeless
    assert hopeless.count(LEVELS[0]) > 0.8 * len(hopeless)


def test_levels_combine_bits_and_periods() -> None:
    assert levels((8, 4), "auto")[:3] == LEVELS
    assert levels((8, 4), 3) == (Level(8, 3), Level(4, 3))
    assert levels((32,), "auto")[:2] == (Level(32, 1), Level(32, 2))


def timed(folder: Path, *words: object) -> dict[str, Any]:
    """Simulate eight workers on four hosts, with steps of 0.1 s and a model of 1 MB."""
    plan = ["--algorithm", NAME, "--compute", "timed", "--compute-time", 0.1, "--model", "size:1"]
    plan += ["--workers", 8, "--servers", 4, "--hosts", 4, "--samples", 8 * 32 * 160, "--quiet"]
    plan += ["--bucket-mb", 0.1, "--run-dir", folder, *words]
    return simulate(parse(SimulateOptions, list(map(str, plan)), "simulate", ""))


@pytest.mark.long
def test_saturated_links_reduce_bits_and_model_frequency(tmp_path: Path) -> None:
    wide = timed(tmp_path / "wide", "--bandwidth-gbit", 10)
    tight = timed(tmp_path / "tight", "--bandwidth-gbit", 0.07)
    full = timed(tmp_path / "full", "--bandwidth-gbit", 0.03)
    assert (wide["wire_bits"], wide["pi"]) == (8, 1)
    assert tight["wire_bits"] < 7
    assert full["pi"] > 1
    assert wide["age_rounds"] < tight["age_rounds"] < 1.5 < full["age_rounds"]
    assert wide["bytes_sent_per_step"] < 0.27 * 1e6


@pytest.mark.long
def test_fixed_wire_and_period_stay_on_saturated_links(tmp_path: Path) -> None:
    words = ["--bandwidth-gbit", 0.06, "--wire", "int8", "--aladdin-ahead-pi", 1]
    end = timed(tmp_path / "run", *words)
    assert (end["wire_bits"], end["pi"]) == (8, 1)
    last = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()][-1]
    assert {"models_sent_at", "wire_bits", "pi", "age_rounds"} <= last.keys()


def test_aladdin_ahead_rejects_bf16_wire(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--wire bf16 .*--wire int8"):
        timed(tmp_path / "run", "--wire", "bf16")


@pytest.mark.long
@pytest.mark.parametrize("wire", [pytest.param("int8", marks=pytest.mark.long), "int4"])
def test_quantised_aladdin_ahead_converges_to_minimum(wire: str) -> None:
    settings = {"weight_decay": 0.0, "momentum": 0.9, "wire": wire}
    case = Job(
        NAME,
        numel=300,
        bucket=60,
        samples=4 * 4 * 200,
        schedule=lambda samples: 0.1,
        noise=0.0,
        jitter=0.05,
        settings=settings,
    )
    end = run(case)
    optimum = Quadratic(case.numel).optimum
    assert float((end.model - optimum).norm()) < 1e-3 * float((end.first - optimum).norm())
