"""AD-PSGD: conservation of the sum of models, trajectories and complete runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from aladdin_mpi.algorithms.ad_psgd import AdPsgdWorker, average, passive_workers
from aladdin_mpi.control.budget import SampleLease
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.transport.base import Transport
from tests.gossip_lab import Spy, any_job, large, noises, run_spied, starts
from tests.quadratic import Quadratic, network
from tests.roles import Job, Outcome, any_network, run

GRAPHS: list[dict[str, Any]] = [{"ad_psgd": {"graph": g}} for g in ("random", "exponential")]


@pytest.mark.parametrize("n", range(2, 17))
def test_ad_psgd_graph_is_bipartite(n: int) -> None:
    passive = set(passive_workers(n))
    active = set(range(n)) - passive
    assert len(passive) - len(active) in (0, 1)


# -- the sum ------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ad_psgd_exchange_keeps_sum_of_models(dtype: torch.dtype) -> None:
    a, b = starts(0, 1000), starts(1, 1000)
    total, spread = a.double() + b.double(), (a - b).norm()
    sent_a, sent_b = a.to(dtype, copy=True), b.to(dtype, copy=True)
    average(a, sent_b, sent_a)
    average(b, sent_a, sent_b)
    assert (a.double() + b.double() - total).abs().max() < 1e-6
    assert (a - b).norm() < 0.01 * spread


@pytest.mark.sample(3)
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("seed", range(10))
def test_ad_psgd_keeps_sum_of_models_without_gradients(seed: int, graph: dict[str, Any]) -> None:
    job = any_job("ad-psgd", seed, **graph)
    job = replace(
        job,
        samples=40 * job.workers,
        schedule=lambda samples: 0.0,
        start=lambda rank: starts(rank, job.numel),
    )
    job = replace(large(job), numel=33_000) if seed == 3 else job
    outcome = run(replace(job, start=lambda rank: starts(rank, job.numel)))
    first = torch.stack([starts(i, job.numel) for i in range(job.workers)]).double()
    final = outcome.locals.double()
    assert (final.sum(0) - first.sum(0)).abs().max() < 2e-5
    assert final.std(0).mean() < 0.8 * first.std(0).mean()


# -- trajectories ---------------------------------------------------------------------------------
Log = list[tuple[str, int, int]]


class Reporter(Spy):
    """Records when passive workers answer and when gradients are complete."""

    def __init__(self, inner: Transport, log: Log) -> None:
        super().__init__(inner)
        self.log = log

    def handled(self, source: int, message: Tensor, tag: int) -> None:
        if tag == Tag.AVERAGE:
            self.log.append(("exchange", source, self.rank))

    def sleep(self, seconds: float = 0.0, *, until: float | None = None) -> None:
        super().sleep(seconds, until=until)
        self.log.append(("computed", self.rank, -1))


def transcribed(job: Job, outcome: Outcome, log: Log) -> list[Tensor]:
    """Apply the paper's rules in float64, in the order in which the events happened."""
    n, problem, options = job.workers, Quadratic(job.numel), job.options
    scale, optimum = problem.scale.double(), problem.optimum.double()
    noise = [noises(job, outcome, i) for i in range(n)]
    lrs = [[job.schedule(t.start) for t in worker.leases] for worker in outcome.workers]
    x = [starts(i, job.numel).double() for i in range(n)]
    stale = [x_i.clone() for x_i in x]
    v = [torch.zeros(job.numel).double() for _ in range(n)]
    begun, complete = [0] * n, [False] * n
    owed: list[bool] = [False] * n

    def apply(i: int) -> None:
        k = begun[i] - 1
        g = scale * (stale[i] - optimum) + noise[i][k] + options.weight_decay * stale[i]
        v[i] = options.momentum * v[i] + g
        x[i] = x[i] - lrs[i][k] * v[i]
        owed[i] = False

    for what, i, j in log:
        if what == "exchange":
            x[i] = x[j] = (x[i] + x[j]) / 2
            complete[i] = True
        elif what == "read":
            if owed[i]:  # an active worker applies its gradient after its exchange
                assert complete[i]
                apply(i)
            stale[i], complete[i], owed[i] = x[i], False, True
            begun[i] += 1
        elif what == "computed" and owed[i] and i % 2 == 0:
            apply(i)
    for i in range(n):
        if owed[i]:
            assert complete[i]
            apply(i)
    return x


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("seed", range(10))
def test_ad_psgd_trajectory_matches_paper(seed: int, graph: dict[str, Any]) -> None:
    n = [2, 3, 4, 5, 6, 7, 8, 11, 13, 16][seed]
    log: Log = []

    def read(transport: Transport, role: object, lease: SampleLease) -> None:
        log.append(("read", transport.rank, -1))

    job = Job(
        "ad-psgd",
        workers=n,
        batch=2,
        samples=2 * n * 15,
        settings={"momentum": 0.8, "weight_decay": 0.01, **graph},
        schedule=lambda samples: 0.1 / (1 + samples / 20),
        slowdown={0: 3.0} if seed % 2 else {n - 1: 3.0},
        jitter=0.4,
        cluster=any_network(seed, n),
        start=lambda rank: starts(rank, 17),
        probe=read,
        seed=seed,
    )
    outcome = run_spied(job, lambda inner: Reporter(inner, log))
    exchanges = [event for event in log if event[0] == "exchange"]
    steps = sum(len(outcome.workers[i].leases) for i in range(1, n, 2))
    assert len(exchanges) == steps  # one in each step of an active worker
    assert all(active % 2 == 1 and passive % 2 == 0 for _, active, passive in exchanges)
    expected = torch.stack(transcribed(job, outcome, log)).float()
    assert torch.allclose(outcome.locals, expected, rtol=1e-5, atol=1e-5)
    modules = torch.stack([worker.role.x for worker in outcome.workers])  # type: ignore[attr-defined]
    assert torch.equal(modules, outcome.locals)


# -- complete runs ------------------------------------------------------------------------------
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("seed", range(12))
def test_ad_psgd_counters_balance_under_any_conditions(seed: int, graph: dict[str, Any]) -> None:
    job = any_job("ad-psgd", 300 + seed, **graph)
    outcome = run(large(job) if seed % 5 == 0 else job)
    outcome.check_accounts()


def test_ad_psgd_passive_workers_do_not_wait_for_active_ones() -> None:
    """The only active worker is slow; the passive workers use the rest of the budget."""
    job = Job("ad-psgd", workers=3, samples=4 * 300, slowdown={1: 50.0})
    outcome = run(job)
    steps = [len(worker.leases) for worker in outcome.workers]
    assert min(steps[0], steps[2]) > 100
    assert steps[1] < 10


def test_ad_psgd_exchange_overlaps_with_computing() -> None:
    """A round trip of 0.8 steps costs an active worker no time."""
    slow = network(latency_us=4e5, local_latency_us=4e5)
    outcome = run(Job("ad-psgd", workers=4, samples=4 * 4 * 50, cluster=slow))
    assert max(worker.traffic.waiting for worker in outcome.workers) < 8


@pytest.mark.sample(1)
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("n", [2, 5, pytest.param(8, marks=pytest.mark.long)])
def test_ad_psgd_converges(n: int, graph: dict[str, Any]) -> None:
    job = Job(
        "ad-psgd",
        workers=n,
        samples=4 * n * 300,
        settings={"weight_decay": 0.0, **graph},
        schedule=lambda samples: 0.05 / (1 + samples / (400 * n)),
        jitter=0.3,
        start=lambda rank: starts(rank, 17),
    )
    outcome = run(job)
    optimum = Quadratic(17).optimum
    assert (outcome.model - optimum).norm() < 0.05 * optimum.norm()
    assert (outcome.locals - optimum).norm(dim=1).max() < 0.15 * optimum.norm()
    assert isinstance(outcome.workers[0].role, AdPsgdWorker)
