"""Workers die at any moment, in virtual time: the others use up the budget, and accounts hold.

``ALADDIN_MPI_SCHEDULES=500`` tries a quarter as many schedules for each algorithm, and not the few
of everyday. A failure is named by its algorithm and seed, which replay it.
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
}
LR = 0.05
SILENCE = 8.5
"""Virtual seconds; the pauses of `any_network` last up to 4, of which two may join."""


def schedule(variant: str, seed: int) -> Job:
    """A run with delays and pauses, in which all workers but one may die, or be left out."""
    r = random.Random(f"{variant} {seed}")
    algorithm, settings = VARIANTS[variant]
    kind = find_algorithm(algorithm)
    workers, servers = r.randint(2, 6), r.randint(1, 2)
    ranks = workers + (servers if kind.has_servers else 0)
    # Rank 0 keeps the budget: its death ends the job, whatever it does besides.
    mortal = list(range(ranks - workers, ranks))
    mortal = [rank for rank in mortal if rank] if not kind.has_servers else mortal
    dying = r.sample(mortal, r.randint(1, max(1, min(len(mortal), workers - 1))))
    steps = r.choice([3, 12, 30])
    network = any_network(seed, ranks).model_dump()
    hanging = dying[: r.choice([0, 0, 1, 2])]
    deaths = {rank: r.uniform(0.0, 1.3 * steps) for rank in dying if rank not in hanging}
    # Shorter ones, of the network, spare whom they hit.
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
        cluster=Cluster(**{**network, "deaths": deaths, "pauses": pauses}),
        seed=seed,
        silence=SILENCE,
    )


@pytest.mark.parametrize("seed", range(max(5, SCHEDULES // 4)))
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_living_go_on(variant: str, seed: int) -> None:
    check_the_living(schedule(variant, seed))


@pytest.mark.parametrize(("by", "wire"), [("ring", "fp32"), ("mpi", "fp32"), ("auto", "bf16")])
@pytest.mark.parametrize("algorithm", ["ar-sgd", "local-sgd"])
def test_who_sums_stays_equal_to_the_bit(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, by: str, wire: str
) -> None:
    """Whoever lacked the sums of a step has them from another, or all have summed again."""
    seen = Counter[str]()
    for name in ("_take", "_begin_again"):
        count_calls(monkeypatch, SurvivingSums, name, seen)
    for seed in range(2 * SCHEDULES):
        job = schedule(algorithm, seed)
        job.settings["wire"] = wire
        job.settings[algorithm.replace("-", "_")] = {"allreduce": by}
        models = [model_of(rank.role, job) for rank in run(job).workers]
        assert all(torch.equal(model, models[0]) for model in models), seed
    assert seen["_begin_again"]
    if (algorithm, by) == ("ar-sgd", "mpi"):  # elsewhere it is seldom that one alone has them
        assert seen["_take"]


def model_of(role: Role, job: Job) -> Tensor:
    """A worker's own model, flat."""
    return torch.cat([role.part(bucket) for bucket in job.layout.buckets])


def count_calls(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, seen: Counter[str]
) -> None:
    method = getattr(owner, name)

    def counted(*args: Any) -> None:
        seen[name] += 1
        method(*args)

    monkeypatch.setattr(owner, name, counted)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("algorithm", ["aladdin", "easgd", "ashl", "bsp"])
def test_so_they_do_in_few_bits(algorithm: str, seed: int) -> None:
    job = schedule(algorithm, seed)
    job.settings["wire"] = ["int8", "int4"][seed % 2]
    check_the_living(job)


def check_the_living(job: Job) -> None:
    outcome = run(job)
    living = [rank for rank in outcome.ranks if rank is not None]
    budget = living[0].budget
    assert budget is not None
    assert budget.drawn == job.samples
    workers = [rank for rank in living if not isinstance(rank.role, ServerAlgorithm)]
    computed = sum(rank.role.counts()["computed"] for rank in workers)
    used = sum(lease.size for rank in workers for lease in rank.leases)
    assert used <= job.samples
    if len(workers) == job.workers:  # who was to die had ended before
        assert used == job.samples
    for rank in living:
        counts = rank.role.counts()
        if isinstance(rank.role, ServerAlgorithm):
            assert counts["applied"] + counts["dropped"] - counts.get("from_failed", 0) == computed
    # The model is as good as the samples that went into it, more or less.
    before = (flat_start(job.numel) - Quadratic(job.numel).optimum).norm()
    after = (outcome.model - Quadratic(job.numel).optimum).norm()
    assert torch.isfinite(outcome.model).all()
    assert after < 1.2 * before


def test_all_dead_but_one() -> None:
    """Half the budget is left to a single worker, which uses it up."""
    job = Job("aladdin", workers=5, samples=400, schedule=lambda samples: LR, noise=0.0)
    deaths = {rank: 10.0 + rank for rank in range(2, 6)}
    job.cluster = any_network(0, 6).model_copy(update={"deaths": deaths, "hosts": 1})
    outcome = run(job)
    (survivor,) = outcome.workers
    assert survivor.role.counts()["computed"] > 30
    before = (flat_start(job.numel) - Quadratic(job.numel).optimum).norm()
    assert (outcome.model - Quadratic(job.numel).optimum).norm() < 0.3 * before
