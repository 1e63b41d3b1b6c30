"""Any rank fails at any time in simulation: the others continue, and the counters balance.

``ALADDIN_MPI_SCHEDULES=500`` tries 500 schedules for each algorithm instead of the default few.
The algorithm and the seed of a failed test replay it.
"""

from __future__ import annotations

import math
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aladdin_mpi import DataParallel
from aladdin_mpi.errors import LostError, PeerFailedError, RefusedError
from aladdin_mpi.options.algorithms import ALGORITHMS, find_algorithm
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.virtual.engine import VirtualCluster

SCHEDULES = int(os.environ.get("ALADDIN_MPI_SCHEDULES", "20"))
BATCH = 4
STEP_SECONDS = 1.0
FEATURES = 3


class Points(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Random points, and the values of a linear function at them."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(FEATURES, generator=generator)
        return x, x.sum(0, keepdim=True)


@dataclass
class Schedule:
    """A run, and the times at which its ranks fail."""

    algorithm: str
    workers: int
    servers: int
    spares: int
    samples: int
    failures: dict[int, float]
    settings: dict[str, Any]
    seed: int
    hosts: int
    reduces: bool
    """Whether workers reduce a value at the end of every epoch."""

    @property
    def size(self) -> int:
        return self.workers + self.servers + self.spares


@dataclass
class Outcome:
    """Results of the ranks; failed ranks have no summary and no model."""

    steps: list[int]
    summaries: dict[int, dict[str, Any]] = field(default_factory=dict)
    models: dict[int, Tensor] = field(default_factory=dict)
    interrupted: int = 0
    """Number of times that a rank has joined another group."""
    began: float | None = None
    """Time of the first step."""
    ended: float = math.inf
    """Time at which the first loop of a rank ended."""
    left_out: int = 0
    """Samples that workers have left out, as their loops had ended."""
    reason: str = ""


def schedule(algorithm: str, seed: int) -> Schedule:
    r = random.Random(f"{algorithm} {seed}")
    kind = find_algorithm(algorithm)
    workers = r.randint(2, 5)
    servers = r.randint(1, min(3, workers)) if kind.has_servers else 0
    spares = r.choice([0, 0, 1, 2])
    size, steps = workers + servers + spares, r.choice([4, 12])
    ranks = range(size)
    failing = r.sample(ranks, min(size - 1, r.choice([1, 1, 2, 2, 3])))
    if r.random() < 0.6 and 0 not in failing:
        failing[0] = 0
    moments = [r.uniform(0.0, 1.3 * steps + 2) for _ in failing]
    if r.random() < 0.3:  # two at once
        moments[-1] = moments[0]
    every = r.choice(["never", str(BATCH * workers * 3)])
    samples = BATCH * workers * steps + r.randint(0, 3)
    # ssp refuses run.reduce().
    reduces = r.random() < 0.3 and algorithm != "ssp"
    if reduces:  # at the ends of whole epochs
        every, samples = "never", 2 * len(Points())
    return Schedule(
        algorithm,
        workers,
        servers,
        spares,
        samples,
        dict(zip(failing, moments, strict=True)),
        {"checkpoint_every": every, "jitter": 0.3, "eval_every": r.choice([0.0, 0.5])},
        seed,
        r.choice([1, 2, size]),
        reduces,
    )


def play(plan: Schedule, folder: Path) -> Outcome:
    outcome = Outcome([0] * plan.size)
    hosts = Cluster(
        hosts=plan.hosts, bandwidth_gbit=1e-3, latency_us=1e3, failures=plan.failures
    ).placed(plan.servers)
    cluster = VirtualCluster(plan.size, hosts, plan.seed)
    try:
        cluster.run(lambda transport: train(transport, plan, folder, outcome))
    except (LostError, RefusedError, PeerFailedError) as error:
        outcome.reason = str(error) or "refused"
    return outcome


def train(transport: Transport, plan: Schedule, folder: Path, outcome: Outcome) -> None:
    torch.manual_seed(plan.seed)
    module = nn.Linear(FEATURES, 1)
    run = DataParallel(
        module,
        transport=transport,
        evaluate=lambda module: {"test_loss": 0.0},
        algorithm=plan.algorithm,
        samples=plan.samples,
        batch_size=BATCH,
        lr=0.02,
        seed=plan.seed,
        servers=max(1, plan.servers),
        spares=plan.spares,
        compute_time=STEP_SECONDS,
        bucket_mb=8e-6,
        run_dir=folder,
        quiet=True,
        **plan.settings,
    )
    for epoch in run.epochs(Points()):
        for x, y in epoch:
            loss = nn.functional.mse_loss(module(x), y)
            loss.backward()
            outcome.steps[transport.rank] += 1
            outcome.began = transport.now() if outcome.began is None else outcome.began
            run.step(loss)
        if epoch == run.epoch_count - 1:
            outcome.ended = min(outcome.ended, transport.now())
        if plan.reduces:
            assert 0 < run.reduce(1.0, "sum").item() <= plan.size
    outcome.interrupted += run.groups - 1
    if run.run_dir is None:
        return  # a spare rank without a role
    if not run.is_server:
        outcome.left_out += run._ready().worker.left_out
    outcome.summaries[transport.rank] = run.summary
    outcome.models[transport.rank] = torch.cat([p.detach().view(-1) for p in module.parameters()])


def check(plan: Schedule, outcome: Outcome) -> None:
    if outcome.reason:
        assert may_end(plan, outcome), outcome.reason
        return
    (figures,) = filter(None, outcome.summaries.values())
    models = list(outcome.models.values())
    assert torch.isfinite(models[0]).all()
    assert all(torch.equal(model, models[0]) for model in models)
    assert figures["samples"] + outcome.left_out == plan.samples
    # Loops that have ended do not compute what is granted again.
    assert not outcome.left_out or max(plan.failures.values()) > outcome.ended
    lost = figures.get("gradients_lost", 0)
    dropped, refused = figures["gradients_dropped"], figures["gradients_refused"]
    assert not refused
    assert figures["gradients_applied"] + dropped + lost == figures["gradients_computed"]
    by_survivors = sum(n for rank, n in enumerate(outcome.steps) if rank not in plan.failures)
    # In a simulation, a step under way when a group is revoked has not been computed yet.
    assert by_survivors - outcome.interrupted <= figures["gradients_computed"] <= sum(outcome.steps)
    reported = {each["rank"] for each in figures["failures"]}
    assert reported <= set(plan.failures)
    if any(model.numel() for model in models):
        before, after = FEATURES, (models[0][:FEATURES] - 1).norm()
        assert after < 2 * before


def may_end(plan: Schedule, outcome: Outcome) -> bool:
    """Return whether failures may have ended the run.

    That is the case if rank 0 and its standby fail together, if too many ranks fail, or if a rank
    fails before the first step or while workers wait for each other.
    """
    if plan.reduces and "run.reduce()" in outcome.reason:
        return True
    first = min(plan.failures.values())
    return len(plan.failures) > 1 or outcome.began is None or first < outcome.began


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(max(4, SCHEDULES // 5)))
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("ar-sgd", {"compression": "dgc", "dgc": {"warmup_epochs": 0}}),
        ("ar-sgd", {"wire": "int4"}),
        ("local-sgd", {"compression": "powersgd"}),
        ("diloco", {"wire": "int8", "diloco": {"steps": 3}}),
    ],
    ids=["dgc", "int4", "powersgd", "diloco"],
)
def test_surviving_ranks_continue_with_compressed_all_reduce(
    algorithm: str, settings: dict[str, Any], seed: int, tmp_path: Path
) -> None:
    plan = schedule(algorithm, seed)
    plan.settings |= settings
    check(plan, play(plan, tmp_path / "run"))


@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", range(SCHEDULES))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_surviving_ranks_continue_after_any_rank_fails(
    algorithm: str, seed: int, tmp_path: Path
) -> None:
    plan = schedule(algorithm, seed)
    check(plan, play(plan, tmp_path / "run"))


@pytest.mark.sample(3)
@pytest.mark.parametrize("length", range(100, 180, 10))
def test_failure_during_setup_continues_from_the_same_state_again(
    length: int, tmp_path: Path
) -> None:
    """Two servers fail, the second at any time of the set-up without the first.

    The length of the folder's name, which ranks exchange, shifts that time.
    """
    plan = schedule("aladdin", 23)
    assert list(plan.failures) == [1, 2] and plan.servers == 3
    outcome = play(plan, tmp_path / f"{'x' * max(1, length - len(str(tmp_path)))}" / "run")
    assert not outcome.reason
    check(plan, outcome)
