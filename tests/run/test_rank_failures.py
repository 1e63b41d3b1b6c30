"""Simulated workers fail at any time: the others use up the budget, and the counters balance.

``ALADDIN_MPI_SCHEDULES=500`` tries a quarter as many schedules for each algorithm instead of the
default few. The algorithm and the seed of a failed test replay it.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from aladdin_mpi.allreduce.surviving import SurvivingSums
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm
from aladdin_mpi.options.algorithms import ALGORITHMS, find_algorithm
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.options.run import RunOptions
from aladdin_mpi.worker.role import Role
from tests.quadratic import Quadratic
from tests.roles import Job, any_network, flat_start, run

SCHEDULES = int(os.environ.get("ALADDIN_MPI_SCHEDULES", "20"))
SURVIVORS = [
    name
    for name, algorithm in ALGORITHMS.items()
    if not algorithm.needs_all(RunOptions(algorithm=name))
]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in SURVIVORS},
    "osgp push-first": ("osgp", {"osgp": {"order": "push-first"}}),
    "diloco fragments": ("diloco", {"diloco": {"steps": 6, "fragments": 3, "overlap": 1}}),
    "async-diloco rounds": (
        "async-diloco",
        {"async_diloco": {"steps": 3, "spread": 0.5, "weights": "samples-per-step"}},
    ),
    "async-diloco grace": ("async-diloco", {"async_diloco": {"steps": 2, "grace": 1.5}}),
    "diloco overlap": ("diloco", {"diloco": {"steps": 4, "fragments": 2, "overlap": 2}}),
}
LR = 0.05
SILENCE = 8.5
"""Simulated seconds; the pauses of `any_network` last up to 4, and two may join."""


def schedule(variant: str, seed: int) -> Job:
    """Return a run with delays and pauses, in which all workers but one may fail or be excluded."""
    r = random.Random(f"{variant} {seed}")
    algorithm, settings = VARIANTS[variant]
    kind = find_algorithm(algorithm)
    workers, servers = r.randint(2, 6), r.randint(1, 2)
    ranks = workers + (servers if kind.has_servers else 0)
    # Rank 0 owns the budget: its failure ends the job, whatever its role.
    candidates = list(range(ranks - workers, ranks))
    candidates = [rank for rank in candidates if rank] if not kind.has_servers else candidates
    failing = r.sample(candidates, r.randint(1, max(1, min(len(candidates), workers - 1))))
    steps = r.choice([3, 12, 30])
    network = any_network(seed, ranks).model_dump()
    hanging = failing[: r.choice([0, 0, 1, 2])]
    failures = {rank: r.uniform(0.0, 1.3 * steps) for rank in failing if rank not in hanging}
    # The network's pauses are shorter, and exclude no rank.
    pauses = [pause for pause in network["pauses"] if pause[0] not in hanging]
    pauses += [(rank, r.uniform(0.0, 1.3 * steps), r.uniform(9.0, 40.0)) for rank in hanging]
    return Job(
        algorithm,
        workers=workers,
        servers=servers,
        samples=4 * workers * steps + r.randint(0, 3),
        segments=r.randint(1, 3),
        bucket=r.choice([5, 17]),
        settings={"weight_decay": 0.0, "momentum": r.choice([0.0, 0.5]), **settings},
        schedule=lambda samples: LR,
        slowdown={r.randrange(workers): r.choice([1.0, 3.0])},
        jitter=0.3,
        noise=0.1,
        cluster=Cluster(**{**network, "failures": failures, "pauses": pauses}),
        seed=seed,
        silence=SILENCE,
    )


@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", range(max(5, SCHEDULES // 4)))
@pytest.mark.parametrize("variant", VARIANTS)
def test_surviving_workers_use_up_the_sample_budget(variant: str, seed: int) -> None:
    check_survivors(schedule(variant, seed))


@pytest.mark.sample(3)
@pytest.mark.parametrize(("by", "wire"), [("ring", "fp32"), ("mpi", "fp32"), ("auto", "bf16")])
@pytest.mark.parametrize(
    "variant", ["ar-sgd", "local-sgd", "diloco", "diloco fragments", "diloco overlap"]
)
def test_surviving_all_reduce_workers_stay_bit_identical(
    monkeypatch: pytest.MonkeyPatch, variant: str, by: str, wire: str
) -> None:
    """A worker that lacks sums of a step gets them from another, or all repeat the all-reduce."""
    seen = Counter[str]()
    for name in ("_receive_sums", "_restart"):
        count_calls(monkeypatch, SurvivingSums, name, seen)
    for seed in range(SCHEDULES):
        job = schedule(variant, seed)
        job.settings["wire"] = wire
        group = job.kind.group
        job.settings[group] = {**job.settings.get(group, {}), "allreduce": by}
        models = [model_of(rank.role, job) for rank in run(job).workers]
        assert all(torch.equal(model, models[0]) for model in models), seed
    assert seen["_restart"]
    if (variant, by) == ("ar-sgd", "mpi"):  # with others a single worker seldom has them
        assert seen["_receive_sums"]


def model_of(role: Role, job: Job) -> Tensor:
    """Return a worker's model as a flat vector."""
    return torch.cat([role.part(bucket) for bucket in job.layout.buckets])


def count_calls(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, seen: Counter[str]
) -> None:
    method = getattr(owner, name)

    def counted(*args: Any) -> None:
        seen[name] += 1
        method(*args)

    monkeypatch.setattr(owner, name, counted)


@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("algorithm", ["aladdin", "easgd", "ashl", "bsp"])
def test_surviving_workers_use_up_the_sample_budget_with_quantisation(
    algorithm: str, seed: int
) -> None:
    job = schedule(algorithm, seed)
    job.settings["wire"] = ["int8", "int4"][seed % 2]
    check_survivors(job)


def check_survivors(job: Job) -> None:
    outcome = run(job)
    survivors = [rank for rank in outcome.ranks if rank is not None]
    budget = survivors[0].budget
    assert budget is not None
    assert budget.drawn == job.samples
    workers = [rank for rank in survivors if not isinstance(rank.role, ServerAlgorithm)]
    computed = sum(rank.role.counts()["computed"] for rank in workers)
    used = sum(lease.size for rank in workers for lease in rank.leases)
    assert used <= job.samples
    if len(workers) == job.workers:  # ranks scheduled to fail had ended before
        assert used == job.samples
    for rank in survivors:
        counts = rank.role.counts()
        if isinstance(rank.role, ServerAlgorithm):
            assert counts["applied"] + counts["dropped"] - counts.get("from_failed", 0) == computed
    # The model's error depends on the samples used, so only a loose bound holds.
    assert torch.isfinite(outcome.model).all()
    assert remaining_distance(job, outcome.model) < 1.2


def remaining_distance(job: Job, model: Tensor) -> float:
    """Return the model's distance from the minimum, relative to that at the start."""
    optimum = Quadratic(job.numel).optimum
    return float((model - optimum).norm() / (flat_start(job.numel) - optimum).norm())


def test_last_surviving_worker_uses_up_the_sample_budget() -> None:
    """A single worker has to use up half the budget."""
    job = Job("aladdin", workers=5, samples=400, schedule=lambda samples: LR, noise=0.0)
    failures = {rank: 10.0 + rank for rank in range(2, 6)}
    job.cluster = any_network(0, 6).model_copy(update={"failures": failures, "hosts": 1})
    outcome = run(job)
    (survivor,) = outcome.workers
    assert survivor.role.counts()["computed"] > 30
    assert remaining_distance(job, outcome.model) < 0.3
