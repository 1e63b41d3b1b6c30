"""Any rank fails at any time in simulation: the others continue, and the counters balance.

``ALADDIN_MPI_SCHEDULES=500`` tries 500 schedules for each algorithm instead of the default few.
The algorithm and the seed of a failed test replay it.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aladdin_mpi import DataParallel
from aladdin_mpi.control.exchange import barrier
from aladdin_mpi.errors import LostError, PeerFailedError, RefusedError, UserError
from aladdin_mpi.hooks import standby
from aladdin_mpi.options.algorithms import ALGORITHMS, find_algorithm
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.run import assembly, rank
from aladdin_mpi.run.run_folder import NAME
from aladdin_mpi.session.context import Context, collect_model
from aladdin_mpi.session.session import Session
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from aladdin_mpi.worker.role import Role, TrainingWorker

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
        seed=plan.seed,
        servers=max(1, plan.servers),
        spares=plan.spares,
        compute_time=STEP_SECONDS,
        bucket_mb=8e-6,
        run_dir=folder,
        quiet=True,
        **{"lr": 0.02, **plan.settings},
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


def test_failure_before_the_first_segment_of_a_group_repeats_no_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next group continues where this one would have."""
    entered: list[float] = []
    start_together = Session._start_together

    def noted(session: Session) -> None:
        if getattr(session._transport, "number", 0) == 2:
            entered.append(session._transport.now())
        start_together(session)

    monkeypatch.setattr(Session, "_start_together", noted)
    settings = {"checkpoint_every": "never", "jitter": 0.3, "eval_every": 0.0}
    plan = Schedule("ar-sgd", 4, 0, 2, 192, {3: 8.0}, settings, 1, 5, False)
    play(plan, tmp_path / "one failure")
    plan.failures[2] = max(entered) + 3e-4
    outcome = play(plan, tmp_path / "two failures")
    check(plan, outcome)
    (figures,) = filter(None, outcome.summaries.values())
    assert 100 < figures["gradients_computed"] * BATCH <= 192


def test_failure_during_setup_closes_the_roles_but_keeps_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks of these roles would take the next group's gradients; another job, the folder."""
    made: list[float] = []
    are_locked: list[bool] = []
    in_use: set[Role] = set()
    make, close = assembly._role, TrainingWorker.close

    def noted(context: Context, *others: Any) -> Role:
        role = make(context, *others)
        in_use.add(role)
        number = getattr(context.transport, "number", 0)
        if number == 2:
            made.append(context.transport.now())
        elif number == 3:
            are_locked.append((folder / NAME).exists())
        return role

    def closing(role: TrainingWorker) -> None:
        in_use.discard(role)
        close(role)

    monkeypatch.setattr(assembly, "_role", noted)
    monkeypatch.setattr(TrainingWorker, "close", closing)
    settings = {"checkpoint_every": "never", "eval_every": 0.0}
    plan = Schedule("asp", 3, 2, 0, 36, {1: 2.5}, settings, 1, 5, False)
    folder = tmp_path / "one failure"
    play(plan, folder)
    in_use.clear()
    plan.failures[4] = max(made) + 5e-4
    folder = tmp_path / "two failures"
    outcome = play(plan, folder)
    check(plan, outcome)
    assert are_locked and all(are_locked)
    assert not any(isinstance(role, TrainingWorker) for role in in_use)


def test_failure_while_models_are_averaged_keeps_the_scale_of_the_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed worker's weight counts only with its model."""
    entered: list[float] = []

    def noted(context: Context, role: Role) -> Tensor | None:
        entered.append(context.transport.now())
        return collect_model(context, role)

    monkeypatch.setattr(rank, "collect_model", noted)
    settings = {"checkpoint_every": "never", "eval_every": 0.0, "lr": 1e-12}
    plan = Schedule("gosgd", 3, 0, 0, 12, {2: 1e6}, settings, 1, 4, False)
    expected = play(plan, tmp_path / "no failure").models[0]
    plan.failures[2] = max(entered) + 0.002
    outcome = play(plan, tmp_path / "a failure")
    check(plan, outcome)
    torch.testing.assert_close(outcome.models[0], expected)


class Growing(nn.Linear):
    """A buffer that grows with each batch of training."""

    batches: Tensor

    def __init__(self) -> None:
        super().__init__(FEATURES, 1)
        self.register_buffer("batches", torch.tensor([0.0]))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.batches += 1
        return super().forward(x)


def resumable(transport: Transport, folder: Path, samples: int, **options: Any) -> list[float]:
    """Train or resume a run with a checkpoint after 96 samples; return the buffer at each batch."""
    torch.manual_seed(0)
    module, seen = Growing(), []
    if folder.exists():
        options["resume"] = str(folder)
    run = DataParallel(
        module,
        transport=transport,
        run_dir=None if "resume" in options else folder,
        samples=samples,
        batch_size=BATCH,
        lr=0.01,
        compute_time=STEP_SECONDS,
        checkpoint_every="48",
        quiet=True,
        **options,
    )
    for epoch in run.epochs(Points()):
        for x, y in epoch:
            seen.append(module.batches.item())
            nn.functional.mse_loss(module(x), y).backward()
            run.step()
    return seen


def test_failure_before_the_first_segment_of_a_resumed_run_skips_no_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(samples: int, failures: dict[int, float]) -> list[list[float] | None]:
        cluster = Cluster(hosts=4, failures=failures)
        options = {"algorithm": "ar-sgd", "spares": 1}
        return VirtualCluster(4, cluster, 0).run(
            lambda transport: resumable(transport, tmp_path / "run", samples, **options)
        )

    job(96, {2: 1e6})
    start_together = Session._start_together

    def together(session: Session) -> None:
        """Meet as over MPI."""
        transport = session._transport
        if getattr(transport, "number", 1) == 1 and session.began_at == 96:
            transport.sleep(1.0 if transport.rank == 2 else 0.0)
            barrier(transport)
        start_together(session)

    monkeypatch.setattr(Session, "_start_together", together)
    steps = [len(seen) for seen in job(192, {2: 0.5}) if seen is not None]
    assert sum(steps) * BATCH == 96


@pytest.mark.parametrize(("algorithm", "failed"), [("ar-sgd", 2), ("aladdin", 1)])
@pytest.mark.parametrize("more", [0, 1])
def test_resumed_ranks_without_state_start_from_buffers_of_others(
    algorithm: str, failed: int, more: int, tmp_path: Path
) -> None:
    """One had failed when the checkpoint was written, another is new."""

    def job(size: int, samples: int, failures: dict[int, float]) -> list[list[float] | None]:
        options: dict[str, Any] = {"algorithm": algorithm}
        if samples > 96:
            options["allow_resize"] = bool(more)
        return VirtualCluster(size, Cluster(hosts=size, failures=failures), 0).run(
            lambda transport: resumable(transport, tmp_path / "run", samples, **options)
        )

    job(4, 96, {failed: 8.3})
    first = [seen[0] for seen in job(4 + more, 192, {failed: 1e6}) if seen]
    assert len(first) == 4 + more - (algorithm == "aladdin")
    assert min(first) > 3


def end_early(
    folder: Path, leave: Callable[[DataParallel], bool]
) -> tuple[list[int], dict[str, Any]]:
    """Train until ``leave`` returns True after three steps; rank 0 fails in the next one.

    Returns:
        The steps of each rank, and the summary.
    """
    steps, summaries = [0] * 3, []

    def main(transport: Transport) -> None:
        module = nn.Linear(FEATURES, 1)
        run = DataParallel(
            module,
            transport=transport,
            algorithm="ar-sgd",
            samples=3 * BATCH * 20,
            batch_size=BATCH,
            compute_time=STEP_SECONDS,
            run_dir=folder,
            quiet=True,
        )
        with suppress(UserError):  # it was closed
            for x, y in run.batches(Points()):
                nn.functional.mse_loss(module(x), y).backward()
                run.step()
                steps[transport.rank] += 1
                if steps[transport.rank] == 3 and leave(run):
                    break
            summaries.append(run.summary)

    VirtualCluster(3, Cluster(hosts=3, failures={0: 4.5 * STEP_SECONDS}), 0).run(main)
    return steps, next(filter(None, summaries), {})


@pytest.mark.parametrize("request_end", [DataParallel.stop, DataParallel.close])
def test_end_of_the_run_requested_from_a_failing_rank_0_is_requested_again(
    request_end: Callable[[DataParallel], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 fails before its standby has a copy with the request."""
    monkeypatch.setattr(standby, "EVERY", 1000)

    def leave(run: DataParallel) -> bool:
        if run.transport.rank != 2:
            return False
        request_end(run)
        return request_end is DataParallel.close

    steps, _ = end_early(tmp_path / "run", leave)
    assert 3 <= steps[0] <= steps[1] < 10


def test_samples_left_out_before_a_failure_are_not_in_the_summary(tmp_path: Path) -> None:
    steps, figures = end_early(tmp_path / "run", lambda run: True)
    assert steps == [3, 3, 3]
    assert figures["samples"] == BATCH * sum(steps) + figures["samples_lost"]
