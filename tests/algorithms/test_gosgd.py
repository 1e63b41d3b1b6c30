"""GoSGD: sum of weights, mixing, queued messages and complete runs."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from aladdin_mpi.algorithms.gosgd import LEAST_ALPHA, GoSgdWorker
from aladdin_mpi.codec.base import DenseWire
from aladdin_mpi.control.budget import SampleLease
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.exchange.gossip import GossipInbox
from aladdin_mpi.flat.layout import Layout, cut
from aladdin_mpi.flat.replica import Replica
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from aladdin_mpi.worker.gradient_pass import Clipping
from aladdin_mpi.worker.step import StepTimeModel
from aladdin_mpi.worker.worker import Worker
from tests.gossip_lab import Spy, any_job, large, run_spied, starts
from tests.quadratic import NO_DELAY, Quadratic, network
from tests.roles import Job, Outcome, run


def gossip(p: float) -> dict[str, Any]:
    return {"gosgd": {"p": p}}


def role(outcome: Outcome, worker: int) -> GoSgdWorker:
    result = outcome.workers[worker].role
    assert isinstance(result, GoSgdWorker)
    return result


def sums(outcome: Outcome) -> list[float]:
    """Return the sum of the workers' alphas for each bucket."""
    alphas = [role(outcome, i).alpha for i in range(outcome.job.workers)]
    return [sum(column) for column in zip(*alphas, strict=True)]


# -- sum of weights at any moment -------------------------------------------------------------
class Mass:
    """Sums a bucket's weights: those of workers, of inboxes and in transit."""

    def __init__(self, n: int, buckets: int) -> None:
        self.n = n
        self.roles: dict[int, GoSgdWorker] = {}
        self.wire = [0.0] * buckets
        self.checks = self.seen_in_flight = self.seen_in_inbox = 0

    def check(self) -> None:
        self.checks += 1
        for bucket, wire in enumerate(self.wire):
            held = [self.roles[r].alpha[bucket] if r in self.roles else 0 for r in range(self.n)]
            inboxes = [role.inbox.weights[bucket] for role in self.roles.values()]
            if len(self.roles) == self.n:
                self.seen_in_flight += wire > 1e-12
                self.seen_in_inbox += sum(inboxes) > 0
                assert sum(held) + sum(inboxes) + wire == pytest.approx(1, abs=1e-9)


class Weigher(Spy):
    """Tracks the weights in transit, from headers that are sent and handled."""

    def __init__(self, inner: Transport, mass: Mass) -> None:
        super().__init__(inner)
        self.mass = mass
        self.to: dict[int, int] = defaultdict(int)
        self.of: dict[int, deque[tuple[int, float]]] = defaultdict(deque)

    def sent(self, buffer: Tensor, dest: int, tag: int) -> None:
        if tag != Tag.GOSSIP or not buffer.numel():
            return
        if self.to[dest]:
            self.to[dest] -= 1
            return
        assert dest != self.rank
        self.to[dest] = len(self.mass.wire)
        for bucket, weight in enumerate(buffer.tolist()):
            self.mass.wire[bucket] += weight

    def handled(self, source: int, message: Tensor, tag: int) -> None:
        if tag != Tag.GOSSIP or not message.numel():
            return
        if self.of[source]:
            bucket, weight = self.of[source].popleft()
            self.mass.wire[bucket] -= weight
        else:
            self.of[source].extend(enumerate(message.view(torch.float64).tolist()))

    def switched(self) -> None:
        self.mass.check()


@pytest.mark.sample(3)
@pytest.mark.parametrize("p", [0.3, 1.0])
@pytest.mark.parametrize("seed", range(10))
def test_gosgd_weights_sum_to_one_at_any_moment(seed: int, p: float) -> None:
    job = any_job("gosgd", seed, **gossip(p))
    mass = Mass(job.workers, len(job.layout.buckets))

    def meet(transport: Transport, worker: object, lease: SampleLease) -> None:
        assert isinstance(worker, GoSgdWorker)
        mass.roles[transport.rank] = worker

    job = replace(job, probe=meet, samples=30 * job.workers, slowdown={})
    outcome = run_spied(job, lambda inner: Weigher(inner, mass))
    assert mass.seen_in_flight and mass.seen_in_inbox
    assert max(map(abs, mass.wire)) < 1e-9
    assert sums(outcome) == pytest.approx([1] * len(mass.wire), abs=1e-12)


# -- mixing -------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_gosgd_keeps_weighted_mean_without_gradients(seed: int, wire: str) -> None:
    job = any_job("gosgd", seed, **gossip(0.5))
    job = replace(
        job,
        samples=30 * job.workers,
        schedule=lambda samples: 0.0,
        start=lambda rank: starts(rank, job.numel),
        settings={**job.settings, "wire": wire},
    )
    outcome = run(job)
    first = torch.stack([starts(i, job.numel) for i in range(job.workers)])
    assert torch.allclose(outcome.model, first.mean(0), atol=1e-5 if wire == "fp32" else 0.03)
    assert outcome.locals.std(0).mean() < 0.7 * first.std(0).mean()


def make_inbox(transport: Transport, layout: Layout) -> GossipInbox:
    replica = Replica(Quadratic(layout.numel))
    pace, schedule = StepTimeModel(1.0), lambda samples: 0.0
    worker = Worker(transport, layout, replica, lambda lease: 0.0, pace, 1, schedule, Clipping())
    return GossipInbox(worker, DenseWire(torch.float32, torch.device("cpu")))


def mix(weights: list[float], alpha: float) -> tuple[Tensor, Tensor, list[float]]:
    """Let rank 0 of 3 mix in models of ranks 1 and 2 that arrive while it computes."""
    layout = cut(6, 0, 100, 100)
    x, alphas = starts(0, 6), [alpha]
    models = [starts(1 + k, 6) for k in range(len(weights))]
    expected = alpha * x.double()
    for w, model in zip(weights, models, strict=True):
        expected = expected + w * model.double()
    expected = expected / (alpha + sum(weights))

    def main(transport: Transport) -> None:
        inbox = make_inbox(transport, layout)
        if transport.rank:
            for k in range(transport.rank - 1, len(weights), 2):
                header = torch.tensor([weights[k]], dtype=torch.float64)
                transport.isend(header, 0, Tag.GOSSIP)
                transport.isend(models[k], 0, Tag.GOSSIP)
        transport.sleep(1.0)
        if transport.rank == 0:
            inbox.take_into(x, alphas)
            inbox.take_into(x, alphas)  # no message is mixed in twice
        inbox.drain()

    VirtualCluster(3, NO_DELAY).run(main)
    return x, expected.float(), alphas


@pytest.mark.parametrize("alpha", [0.25, 1e-60])
def test_gosgd_mixes_waiting_messages_by_their_weights(alpha: float) -> None:
    """Also with weights that single precision cannot represent."""
    weights = [alpha * factor for factor in (1, 0.5, 2, 0.25, 0.125)]
    x, expected, alphas = mix(weights, alpha)
    assert torch.allclose(x, expected, atol=1e-6)
    assert alphas == pytest.approx([alpha + sum(weights)], rel=1e-12)


# -- sending ------------------------------------------------------------------------------------
def gossips(p: float, job: Job, seed: int = 0) -> dict[tuple[int, int], int]:
    """Return the number of models that each worker has sent to each other worker."""
    count: dict[tuple[int, int], int] = defaultdict(int)

    class Counter(Spy):
        def sent(self, buffer: Tensor, dest: int, tag: int) -> None:
            if tag == Tag.GOSSIP and buffer.dtype == torch.float64:
                count[self.rank, dest] += 1

    outcome = run_spied(replace(job, settings={**gossip(p), "seed": seed}), Counter)
    outcome.check_accounts()
    return count


@pytest.mark.long
def test_gosgd_draws_peers_evenly_with_probability_p() -> None:
    job = Job("gosgd", workers=5, samples=4 * 5 * 400)
    short = replace(job, samples=4 * 5 * 100)
    count = gossips(0.25, job)
    assert set(count) == {(i, j) for i in range(5) for j in range(5) if i != j}
    # 400 steps: 100 models from each worker, 25 to each other; four standard deviations.
    assert all(abs(number - 25) < 4 * 25**0.5 for number in count.values())
    once = gossips(0.25, short)
    assert once == gossips(0.25, short)
    assert once != gossips(0.25, short, seed=1)
    assert sum(gossips(1.0, short).values()) == 5 * 100


def test_gosgd_neither_waits_nor_queues_on_slow_network() -> None:
    """A model takes 20 steps on the wire; models that cannot be sent are skipped."""
    numel = 33_000
    slow = network(hosts=2, bandwidth_gbit=numel * 32e-9 / 20)
    job = Job("gosgd", workers=2, numel=numel, bucket=16_500, samples=4 * 2 * 200, cluster=slow)
    count = gossips(1.0, job)
    assert all(5 <= number <= 11 for number in count.values())
    outcome = run(replace(job, settings=gossip(1.0)))
    # Only for the other workers' end and for the last model.
    assert max(rank.traffic.waiting for rank in outcome.ranks) < 60
    assert sums(outcome) == pytest.approx([1, 1], abs=1e-12)


def test_gosgd_weight_never_becomes_zero() -> None:
    """A worker a thousand times as fast as the other receives nothing while it sends."""
    job = Job("gosgd", workers=2, samples=1600, batch=1, slowdown={0: 3000.0}, noise=0.0)
    least = 1.0

    def look(transport: Transport, worker: object, lease: SampleLease) -> None:
        nonlocal least
        assert isinstance(worker, GoSgdWorker)
        least = min(least, *worker.alpha)

    outcome = run(replace(job, settings=gossip(1.0), probe=look))
    assert LEAST_ALPHA / 2 <= least < 1e-200
    assert sums(outcome) == pytest.approx([1], abs=1e-12)
    assert torch.isfinite(outcome.locals).all()


# -- complete runs ------------------------------------------------------------------------------
@pytest.mark.parametrize("p", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(12))
def test_gosgd_counters_balance_under_any_conditions(seed: int, p: float) -> None:
    job = any_job("gosgd", 200 + seed, **gossip(p))
    outcome = run(large(job) if seed % 5 == 0 else job)
    outcome.check_accounts()
    total = sums(outcome)
    assert total == pytest.approx([1] * len(total), abs=1e-12)
    for i in range(job.workers):
        assert not any(role(outcome, i).inbox.weights)


@pytest.mark.sample(1)
@pytest.mark.parametrize("n", [2, 5, 8])
def test_gosgd_converges(n: int) -> None:
    job = Job(
        "gosgd",
        workers=n,
        samples=4 * n * 300,
        settings={"weight_decay": 0.0, **gossip(0.3)},
        schedule=lambda samples: 0.05 / (1 + samples / (400 * n)),
        jitter=0.3,
        start=lambda rank: starts(rank, 17),
    )
    outcome = run(job)
    optimum = Quadratic(17).optimum
    assert (outcome.model - optimum).norm() < 0.05 * optimum.norm()
