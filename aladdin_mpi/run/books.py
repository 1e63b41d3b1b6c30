"""What rank 0 alone has of a run: the coordinator, and the metrics that are written of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from aladdin_mpi.data.skipped import SkipRecord, SkipReports
from aladdin_mpi.parameter_server.server_role import Server
from aladdin_mpi.roles.role import Role
from aladdin_mpi.run.context import Context
from aladdin_mpi.run.coordinator import Coordinator
from aladdin_mpi.run.divided_evaluation import DividedEvaluation
from aladdin_mpi.run.evaluations import Evaluations
from aladdin_mpi.run.evaluator import Evaluator
from aladdin_mpi.run.measurement import Evaluate
from aladdin_mpi.run.plan import Plan
from aladdin_mpi.run.progress import Progress
from aladdin_mpi.run.recorder import Metrics
from aladdin_mpi.run.schedule import LearningRate
from aladdin_mpi.run.snapshots import Snapshots
from aladdin_mpi.run.training_log import TrainingLog
from aladdin_mpi.run.variance import ModelVariance


@dataclass(frozen=True)
class Books:
    """All that rank 0 writes and shows."""

    coordinator: Coordinator
    metrics: Metrics
    log: TrainingLog
    evaluations: Evaluations

    def give_up(self) -> None:
        """Somebody else keeps them from now on, or others are opened here."""
        self.log.give_up()
        self.metrics.close()


def make_coordinator(
    context: Context, role: Role, plan: Plan, lr: LearningRate, skips: SkipRecord
) -> Coordinator:
    """At rank 0, whose ``role`` this is."""
    algorithm, options = context.algorithm, context.options
    return Coordinator(
        context.transport,
        plan,
        lr,
        context.workers,
        role.server if isinstance(role, Server) else None,
        skips,
        context.leaders if algorithm.lockstep else (),
        context.needs_all,
        options.worker_timeout,
    )


def open_books(
    context: Context,
    coordinator: Coordinator,
    folder: Path,
    skips: SkipReports,
    evaluate: Evaluate | None,
    divided: DividedEvaluation | None,
    snapshots: Snapshots,
    variance: ModelVariance,
    keeps_all: bool = False,
) -> Books:
    """At rank 0, when the coordinator knows where the run goes on, into the run's ``folder``.

    There are no evaluations where ``evaluate`` is None. With ``keeps_all`` the metrics go on behind
    whatever there is; otherwise what is behind this place of the run is dropped.
    """
    metrics = Metrics(folder, coordinator.plan.total if keeps_all else coordinator.budget.drawn)
    if keeps_all and (trained := [line for line in metrics.lines if line["kind"] == "train"]):
        coordinator.catch_up(trained[-1]["samples"], trained[-1]["seconds"])
    drawn = coordinator.budget.drawn
    skips.open()
    # Before what follows, which takes seconds.
    progress = Progress(
        coordinator.plan.total,
        drawn,
        coordinator.seconds,
        coordinator.state,
        context.options.progress,
        context.options.quiet,
    )
    evaluator = None
    if evaluate is not None:
        evaluator = _evaluator(context, skips, evaluate, divided)
    return Books(
        coordinator,
        metrics,
        TrainingLog(coordinator, metrics, progress),
        Evaluations(context.transport, coordinator, metrics, evaluator, snapshots, variance),
    )


def _evaluator(
    context: Context, skips: SkipReports, evaluate: Evaluate, divided: DividedEvaluation | None
) -> Evaluator:
    def measure(module: nn.Module) -> Mapping[str, float]:
        figures = evaluate(module)
        skips.pass_on()  # rank 0 reads images too
        return figures

    return Evaluator(context.module, measure, not context.transport.models_time, divided)
