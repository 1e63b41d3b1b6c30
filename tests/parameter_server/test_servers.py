"""BSP, ASP, SHAT, SSP, EASGD and EAMSGD in simulation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from aladdin_mpi.algorithms.shat import staleness_weight
from aladdin_mpi.algorithms.ssp import SspWorker
from aladdin_mpi.control.budget import SampleLease
from aladdin_mpi.exchange.server_mailbox import Header
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.worker.role import Role
from tests.quadratic import NO_DELAY, Quadratic
from tests.roles import Job, Outcome, any_network, flat_start, noise_of_samples, run, single_process

SERVED = ["bsp", "asp", "shat", "ssp", "easgd", "eamsgd"]
MOMENTUM = {"momentum": 0.9, "weight_decay": 0.01}


def any_job(algorithm: str, seed: int) -> Job:
    """Return a random run."""
    r = random.Random(f"{algorithm} {seed}")
    workers, servers = r.randint(1, 7), r.randint(1, 3)
    settings: dict[str, Any] = {
        "momentum": r.choice([0.0, 0.9]),
        "weight_decay": r.choice([0.0, 0.01]),
        "wait_free": r.random() < 0.7,
        "wire": r.choice(["fp32", "fp32", "bf16"]),
        "ssp": {"bound": r.randint(0, 3), "pull": r.choice(["always", "on-bound"])},
        "asp": {"momentum": r.choice(["server", "worker"])},
        "bsp": {"host_first": r.random() < 0.5, "group": r.choice([None, 1, 2])},
        "easgd": {"tau": r.randint(1, 4)},
    }
    return Job(
        algorithm,
        workers=workers,
        servers=servers,
        numel=r.randint(20, 60),
        bucket=r.randint(5, 30),
        samples=r.choice([r.randint(1, 9), r.randint(30, 160)]),
        batch=r.randint(1, 5),
        segments=r.randint(1, 3),
        settings=settings,
        schedule=lambda samples: 0.02,
        slowdown={0: r.choice([1.0, 1.0, 8.0])},
        jitter=r.choice([0.0, 0.3]),
        cluster=any_network(seed, servers + workers),
        seed=seed,
    )


@pytest.mark.sample(8)
@pytest.mark.parametrize("algorithm", SERVED)
@pytest.mark.parametrize("seed", range(40))
def test_server_counters_balance_in_random_jobs(algorithm: str, seed: int) -> None:
    end = run(any_job(algorithm, seed))
    end.check_accounts()
    assert end.model.isfinite().all()


# -- against a single process ---------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("host_first", [False, True])
def test_bsp_equals_one_process_with_the_n_fold_batch(workers: int, host_first: bool) -> None:
    job = Job(
        "bsp",
        workers=workers,
        servers=2,
        numel=40,
        bucket=9,
        samples=30 * workers + 5,
        segments=2,
        settings={**MOMENTUM, "bsp": {"host_first": host_first}},
        schedule=lambda samples: 0.05 if samples < 60 else 0.01,
        slowdown={0: 3.0},
        cluster=any_network(3, workers + 2),
    )
    # With an even segment limit, rounds are never cut, as without segments.
    job.samples += job.samples % 2
    if (job.samples // 2) % (job.batch * workers):
        job.segments = 1
    end = run(job)
    end.check_accounts()
    torch.testing.assert_close(end.model, single_process(job), rtol=1e-4, atol=1e-5)
    for mine in end.locals:
        assert torch.equal(mine, end.model)


def test_bsp_host_first_sends_one_gradient_per_host() -> None:
    hosts, workers = 2, 6
    sent = {}
    for host_first in (False, True):
        job = Job(
            "bsp",
            workers=workers,
            samples=240,
            numel=400,
            settings={"bsp": {"host_first": host_first}},
            cluster=Cluster.model_validate({"hosts": hosts}),
        )
        end = run(job)
        sent[host_first] = end.servers[0].traffic.bytes_received / (4 * job.numel * 10)
    # Per round: a gradient from each worker, or one from each host, plus headers and leases.
    assert workers <= sent[False] < workers + 0.6
    assert hosts <= sent[True] < hosts + 0.6


def test_asp_reads_every_header_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a bucket arrives, a worker polls all servers; this must not cost more for each."""
    read = 0
    unpack = Header.unpack

    def counted(numbers: Sequence[float]) -> Header:
        nonlocal read
        read += 1
        return unpack(numbers)

    monkeypatch.setattr(Header, "unpack", staticmethod(counted))
    # Headers arrive long before their buckets: 20 kB take 0.2 s, so there is much to poll.
    slow = Cluster.model_validate({"hosts": 5, "bandwidth_gbit": 8e-4})
    job = Job("asp", workers=2, servers=3, numel=60_000, bucket=5000, samples=80, cluster=slow)
    end = run(job)
    end.check_accounts()
    steps, buckets = 20, len(job.layout.buckets)
    # A gradient has one for each server, a model one for each bucket; plus the last of each side.
    assert read == steps * (3 + buckets) + 2 * 2 * 3


def test_bsp_group_limits_the_workers_aggregated_on_a_host() -> None:
    """Two hosts of six workers: groups of 4 and 2 on each, so four gradients per round."""
    job = Job(
        "bsp",
        workers=12,
        samples=480,
        numel=400,
        settings={"bsp": {"host_first": True, "group": 4}},
        cluster=Cluster.model_validate({"hosts": 2}),
    )
    end = run(job)
    end.check_accounts()
    rounds = 10
    gradients = end.servers[0].traffic.bytes_received / (4 * job.numel * rounds)
    assert 4 <= gradients < 4 + 0.8
    torch.testing.assert_close(end.model, single_process(job), rtol=1e-4, atol=1e-5)


# -- values that BSP's codecs hold back ----------------------------------------------


class Linear(nn.Module):
    """A problem with one matrix, whose gradient is the noise for any model."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(numel // 10, 10))

    def forward(self, noise: Tensor) -> Tensor:
        return (noise.view_as(self.matrix) * self.matrix).sum()


def held_back(end: Outcome) -> Tensor:
    """Return the values that the workers' codecs still hold, one worker per row."""
    codecs: list[Any] = [worker.role.link.outbox._codec for worker in end.workers]  # type: ignore[attr-defined]
    return torch.stack([getattr(codec, "residual", codec).left for codec in codecs])


LOSSY = [{"compression": "dgc", "dgc": {"ratio": 0.05, "warmup_epochs": 0}}, {"wire": "int4"}]


def lossy_job(settings: dict[str, Any], samples: int) -> Job:
    """Return a run with momentum and weight decay off, in rounds of 16 samples."""
    settings = {"momentum": 0.0, "weight_decay": 0.0, **settings}
    return Job(
        "bsp",
        servers=2,
        numel=400,
        bucket=150,
        samples=samples,
        noise=1.0,
        settings=settings,
        problem=Linear,
    )


@pytest.mark.parametrize("settings", LOSSY, ids=["dgc", "int4"])
def test_bsp_applies_all_but_the_values_that_codecs_hold_back(settings: dict[str, Any]) -> None:
    """In the last round, with one sample, three workers send only values held back before."""
    exact, lossy = run(lossy_job({}, 49)), run(lossy_job(settings, 49))
    lossy.check_accounts()
    left = held_back(lossy).sum(0)
    assert left.abs().max() > 0.5
    torch.testing.assert_close(lossy.model, exact.model + 0.05 / 4 * left)


@pytest.mark.parametrize("settings", LOSSY, ids=["dgc", "int4"])
def test_bsp_divides_held_back_values_by_workers_in_round_without_samples(
    settings: dict[str, Any],
) -> None:
    """The worker with the only sample of the last round fails; the others have none."""
    exact, before = run(lossy_job({}, 48)), run(lossy_job(settings, 48))
    failures = NO_DELAY.model_copy(update={"failures": {2: 3.5}})
    end = run(replace(lossy_job(settings, 49), cluster=failures))
    assert len(end.workers) == 3
    left = held_back(end).sum(0) + held_back(before)[0]
    torch.testing.assert_close(end.model, exact.model + 0.05 / 4 * left)


# -- handling time ------------------------------------------------------------------


def waited(algorithm: str, workers: int, settings: dict[str, Any], **cluster: float) -> float:
    """Return the last worker's wait in a step of 1 s, with 17 values in one bucket."""
    changed = NO_DELAY.model_copy(update=cluster)
    job = Job(algorithm, workers=workers, samples=40 * workers, settings=settings, cluster=changed)
    return float(run(job).workers[-1].traffic.waiting) / 10


def test_modelled_server_takes_time_for_its_memory_traffic() -> None:
    seconds = 4 * 17 * (5 + 2) / 1000  # received and sent
    assert waited("asp", 1, {}, memory_gbyte=1e-6) == pytest.approx(seconds, abs=0.01)
    assert waited("asp", 1, {}) == pytest.approx(0, abs=0.01)


def test_modelled_server_takes_time_for_each_message() -> None:
    assert waited("asp", 1, {}, handling_us=2e5) == pytest.approx(2 * 0.2, abs=0.01)
    # Two gradients in, two models out; from the second round on, the worker that is answered first
    # is 0.2 s ahead, during which its gradient is processed.
    measured = waited("bsp", 2, {}, handling_us=2e5)
    assert measured == pytest.approx((4 + 9 * 3) * 0.2 / 10, abs=0.01)


def test_modelled_bsp_leader_takes_time_to_sum_its_host() -> None:
    """Three followers; the server has one gradient to process and one model to send."""
    seconds = 4 * 17 * (3 * 5 + 5 + 2) / 10_000
    measured = waited("bsp", 4, {"bsp": {"host_first": True}}, memory_gbyte=1e-5)
    assert measured == pytest.approx(seconds, abs=0.01)


# -- ASP and SHAT -----------------------------------------------------------------


def test_asp_with_one_worker_is_sgd() -> None:
    job = Job("asp", workers=1, settings=MOMENTUM, numel=30, bucket=7)
    torch.testing.assert_close(run(job).model, single_process(job), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("place", ["server", "worker"])
def test_asp_follows_its_update_rule(place: str) -> None:
    """Compared with events computed by hand: gradients are applied one by one as they arrive."""
    job = Job(
        "asp",
        workers=3,
        samples=96,
        settings={**MOMENTUM, "asp": {"momentum": place}},
        slowdown={0: 1.0, 1: 1.173, 2: 1.41},
    )
    problem = Quadratic(job.numel)
    scale, optimum = problem.scale.double(), problem.optimum.double()
    x = flat_start(job.numel).double()
    velocity = [torch.zeros_like(x) for _ in range(3)]
    used: list[list[SampleLease]] = [[], [], []]
    local = [x.clone() for _ in range(3)]
    due = sorted((job.slowdown[w], w) for w in range(3))
    drawn = 3 * job.batch
    while due:
        now, w = due.pop(0)
        lease = SampleLease(0, job.batch, job.batch)
        noise = noise_of_samples(job, w, used[w], lease).double()
        used[w].append(lease)
        g = scale * (local[w] - optimum) + noise
        where = 0 if place == "server" else w
        g = g + 0.01 * (x if place == "server" else local[w])
        velocity[where] = 0.9 * velocity[where] + g
        x = x - 0.05 / 3 * velocity[where]
        local[w] = x.clone()
        if drawn < job.samples:
            drawn += job.batch
            due = sorted([*due, (now + job.slowdown[w], w)])
    torch.testing.assert_close(run(job).model, x.float(), rtol=1e-4, atol=1e-5)


def test_shat_staleness_weight_follows_the_formula() -> None:
    """``1 - s/log n``, ``s = n/c``: the paper's formula, and its limits."""
    assert staleness_weight(7, 8, "2") == pytest.approx(1 - 8 / 7 / 3)
    assert staleness_weight(15, 16, "e") == pytest.approx(1 - 16 / 15 / np.log(16))
    assert staleness_weight(0, 8, "2") == 0.0
    assert staleness_weight(1, 8, "2") == 0.0
    assert staleness_weight(10**9, 8, "2") == pytest.approx(1.0)
    assert staleness_weight(5, 1, "2") == 0.0


def test_shat_blends_models_by_staleness() -> None:
    """Workers of nearly equal speed take turns: c is 0, 1, 2, 3 at first, then n - 1."""
    n, m, decay = 4, 0.9, 0.01
    job = Job(
        "shat",
        workers=n,
        samples=160,
        settings={**MOMENTUM, "shat": {"log": "e"}},
        slowdown={w: 1 + w / 500 for w in range(n)},
    )
    end = run(job)
    problem = Quadratic(job.numel)
    scale, optimum = problem.scale.double(), problem.optimum.double()
    centre = end.first.double()
    x = [centre.clone() for _ in range(n)]
    v = [torch.zeros_like(centre) for _ in range(n)]
    used: list[list[SampleLease]] = [[] for _ in range(n)]
    lease = SampleLease(0, job.batch, job.batch)
    for step in range(10):
        for w in range(n):
            g = scale * (x[w] - optimum) + noise_of_samples(job, w, used[w], lease).double()
            used[w].append(lease)
            v[w] = m * v[w] + g + decay * x[w]
            centre = centre - 0.05 / n * v[w]
            x[w] = x[w] - 0.05 * v[w]
            others = w if step == 0 else n - 1
            s = n / others if others else float("inf")
            alpha = min(1.0, max(0.0, 1 - s / np.log(n)))
            x[w] = (1 - alpha) * x[w] + alpha * centre
    torch.testing.assert_close(end.model, centre.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(end.locals, torch.stack(x).float(), rtol=1e-4, atol=1e-5)


# -- SSP -----------------------------------------------------------------------


class Ahead:
    """Records each worker's lead over the slowest at the start of each step."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.roles: dict[int, Role] = {}
        self.most = 0

    def __call__(self, transport: Transport, role: Role, lease: SampleLease) -> None:
        self.roles[transport.rank] = role
        if lease.start > 120:
            return  # towards the end some workers have ended, and no worker waits for them
        finished = [role.counts()["computed"] for role in self.roles.values()]
        slowest = min(finished) if len(finished) == self.workers else 0
        self.most = max(self.most, role.counts()["computed"] - slowest)


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("pull", ["always", "on-bound"])
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_ssp_blocks_worker_beyond_bound(pull: str, bound: int, seed: int) -> None:
    ahead = Ahead(5)
    job = replace(
        any_job("ssp", seed),
        workers=5,
        samples=200,
        batch=2,
        segments=1,
        slowdown={1: 6.0},
        probe=ahead,
        settings={"ssp": {"bound": bound, "pull": pull}},
    )
    job.cluster = any_network(seed, job.servers + 5)
    run(job).check_accounts()
    # With pulls every bound + 1 steps, a worker advances up to bound steps further by itself.
    assert ahead.most <= (bound if pull == "always" else 2 * bound)
    assert ahead.most >= bound  # the bound was reached: it blocks the fast workers


def test_ssp_with_bound_zero_equals_bsp() -> None:
    plain = {"momentum": 0.0, "weight_decay": 0.0}
    ssp = Job(
        "ssp",
        workers=4,
        samples=160,
        numel=30,
        bucket=8,
        slowdown={2: 3.0},
        settings={**plain, "ssp": {"bound": 0}},
    )
    bsp = replace(ssp, algorithm="bsp", settings=plain)
    torch.testing.assert_close(run(ssp).model, run(bsp).model, rtol=1e-5, atol=1e-6)


class Falling(Quadratic):
    """A problem whose gradient is -1 everywhere."""

    def forward(self, noise: Tensor | float = 0.0) -> Tensor:
        return -torch.cat([part.view(-1) for part in self.parts]).sum()


def test_ssp_reads_all_updates_up_to_its_bound() -> None:
    """Ho et al.: a worker at clock c sees every update of step c - bound - 1 and before."""
    bound, workers = 2, 4
    first = flat_start(17)

    def probe(transport: Transport, role: Role, lease: SampleLease) -> None:
        clock = role.worker.computed  # type: ignore[attr-defined]
        # Every gradient is -1, divided by n: the model counts the updates in it.
        updates = (role.x - first).mean().item() * workers / 0.01  # type: ignore[attr-defined]
        assert updates > workers * (clock - bound) - 0.01

    job = Job(
        "ssp",
        workers=workers,
        samples=200,
        batch=1,
        schedule=lambda samples: 0.01,
        slowdown={0: 5.0, 2: 1.7},
        cluster=any_network(5, 5),
        settings={"momentum": 0.0, "ssp": {"bound": bound}},
        probe=probe,
        problem=Falling,
    )
    run(job).check_accounts()


def test_ssp_on_bound_sends_every_gradient_unless_it_coalesces() -> None:
    """A server that needs 3 s per gradient, and workers that need 1 s.

    The buckets are too large to be buffered, and outnumber the posted receives.
    """
    coalesced = {}
    large: dict[str, Any] = {"workers": 2, "numel": 68_000, "bucket": 17_000, "samples": 120}
    for coalesce in (True, False):
        settings = {"ssp": {"bound": 3, "pull": "on-bound", "coalesce": coalesce}}
        slow = NO_DELAY.model_copy(update={"handling_us": 0.75e6})
        end = run(Job("ssp", settings=settings, cluster=slow, **large))
        end.check_accounts()
        ssp_workers = [rank.role for rank in end.workers]
        coalesced[coalesce] = sum(
            w.link.outbox.coalesced for w in ssp_workers if isinstance(w, SspWorker)
        )
    assert coalesced[True] > 0
    assert coalesced[False] == 0


def test_ssp_on_bound_applies_own_updates_between_pulls() -> None:
    """A single worker takes the same steps between two pulls as its server."""
    settings = {"momentum": 0.0, "weight_decay": 0.0, "ssp": {"bound": 3, "pull": "on-bound"}}
    job = Job("ssp", workers=1, samples=80, settings=settings)
    torch.testing.assert_close(run(job).model, single_process(job), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("workers", [2, 3])
def test_easgd_alpha_defaults_to_beta_over_workers(workers: int) -> None:
    """By default alpha is 0.9 / n, as its paper has beta = 0.9."""
    (server,) = run(Job("easgd", workers=workers, samples=40)).servers
    assert server.role.alpha == pytest.approx(0.9 / workers)  # type: ignore[attr-defined]


def test_ssp_on_bound_pulls_every_bound_plus_one_steps() -> None:
    received = {}
    for pull in ("always", "on-bound"):
        job = Job(
            "ssp", workers=4, samples=640, numel=300, settings={"ssp": {"bound": 3, "pull": pull}}
        )
        end = run(job)
        received[pull] = sum(w.traffic.bytes_received for w in end.workers) / (4 * 300 * 160)
    assert received["always"] == pytest.approx(1, rel=0.12)
    assert received["on-bound"] == pytest.approx(1 / 4, rel=0.4)
    assert received["on-bound"] < 0.37


# -- EASGD ------------------------------------------------------------------------


def elastic_sum(end: Outcome) -> Tensor:
    return end.locals.double().sum(0) + end.model.double()


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("algorithm", ["easgd", "eamsgd"])
def test_elastic_exchanges_preserve_the_sum_of_models(algorithm: str, seed: int) -> None:
    job = replace(
        any_job(algorithm, seed),
        workers=5,
        samples=150,
        schedule=lambda samples: 0.0,
        start=lambda index: torch.arange(40.0) * (index + 1),
        numel=40,
    )
    job.cluster = any_network(seed, job.servers + 5)
    job.settings.update(wire="fp32", weight_decay=0.0)
    end = run(job)
    begun = sum(torch.arange(40.0) * (index + 1) for index in range(5)) + end.first
    assert not torch.equal(end.model, end.first)
    torch.testing.assert_close(elastic_sum(end).float(), begun, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("exchange", ["after", "before"])
def test_easgd_follows_its_update_rule(exchange: str) -> None:
    """Algorithm 1, in lockstep because the workers are almost equally fast."""
    job = Job(
        "easgd",
        workers=3,
        samples=120,
        settings={**MOMENTUM, "easgd": {"tau": 2, "alpha": 0.2, "exchange": exchange}},
        slowdown={0: 1.0, 1: 1.001, 2: 1.002},
    )
    assert_equal_to(job, nesterov=False)


@pytest.mark.parametrize("exchange", ["after", "before"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_eamsgd_follows_its_update_rule(decay: float, exchange: str) -> None:
    """Equations 9 and 10: ``v <- d v - lr g(x + d v)``, ``x <- x + v``."""
    job = Job(
        "eamsgd",
        workers=3,
        samples=120,
        settings={
            "momentum": 0.8,
            "weight_decay": decay,
            "easgd": {"tau": 2, "alpha": 0.2, "exchange": exchange},
        },
        slowdown={0: 1.0, 1: 1.001, 2: 1.002},
    )
    assert_equal_to(job, nesterov=True)


def assert_equal_to(job: Job, nesterov: bool) -> None:
    problem = Quadratic(job.numel)
    scale, optimum = problem.scale.double(), problem.optimum.double()
    centre = flat_start(job.numel).double()
    x = [centre.clone() for _ in range(3)]
    v = [torch.zeros_like(centre) for _ in range(3)]
    m, decay, lr = job.options.momentum, job.options.weight_decay, 0.05
    used: list[list[SampleLease]] = [[], [], []]
    lease = SampleLease(0, job.batch, job.batch)
    is_before = job.settings["easgd"]["exchange"] == "before"

    def exchange(w: int) -> None:
        nonlocal centre
        d = 0.2 * (x[w] - centre)
        x[w], centre = x[w] - d, centre + d

    for step in range(10):  # "if tau divides t"; at t = 0 all models are the same
        for w in range(3):
            noise = noise_of_samples(job, w, used[w], lease).double()
            used[w].append(lease)
            ahead = x[w] + m * v[w] if nesterov else x[w]
            g = scale * (ahead - optimum) + noise + decay * ahead
            if is_before and step and step % 2 == 0:
                exchange(w)
            v[w] = m * v[w] - lr * g
            x[w] = x[w] + v[w]
            if step == 9 or (not is_before and step % 2 == 1):
                exchange(w)
    end = run(job)
    end.check_accounts()
    torch.testing.assert_close(end.model, centre.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(end.locals, torch.stack(x).float(), rtol=1e-4, atol=1e-5)


# -- convergence --------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("algorithm", SERVED)
@pytest.mark.parametrize("workers", [2, pytest.param(5, marks=pytest.mark.long)])
def test_algorithm_with_servers_converges_to_the_known_minimum(
    algorithm: str, workers: int
) -> None:
    job = Job(
        algorithm,
        workers=workers,
        samples=2400 * workers,
        settings={"momentum": 0.5, "weight_decay": 0.0, "easgd": {"alpha": 0.1}},
        schedule=lambda samples: 0.2,
        noise=0.0,
        slowdown={0: 3.0},
        cluster=any_network(workers, workers + 1),
    )
    optimum = Quadratic(job.numel).optimum
    assert (run(job).model - optimum).abs().max() < 0.01
