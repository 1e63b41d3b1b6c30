"""What rank 0 alone has of a run: the coordinator, and the metrics that are written of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from aladdin_mpi.control.budget import WorkerReport
from aladdin_mpi.data.images import SkipRecord, SkipReports
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm
from aladdin_mpi.optimizers.sgd import LearningRate
from aladdin_mpi.run.context import Context
from aladdin_mpi.run.coordinator import Coordinator, Losses
from aladdin_mpi.run.divided_evaluation import DividedEvaluation
from aladdin_mpi.run.evaluation import Evaluations, Evaluator, Snapshots
from aladdin_mpi.run.measurement import Evaluate
from aladdin_mpi.run.plan import Plan
from aladdin_mpi.run.progress import Progress
from aladdin_mpi.run.recorder import Metrics
from aladdin_mpi.run.variance import ModelVariance
from aladdin_mpi.worker.role import Role


class TrainingLog:
    """Writes a line of metrics every so many samples, and shows the progress.

    Args:
        coordinator: whose reports it hears.
    """

    def __init__(self, coordinator: Coordinator, metrics: Metrics, progress: Progress) -> None:
        self._coordinator = coordinator
        self._metrics = metrics
        self._progress = progress
        coordinator.on_report(self._hear)
        coordinator.on_close(self._catch_up)

    def _hear(self, report: WorkerReport) -> None:
        coordinator = self._coordinator
        drawn, every = coordinator.budget.drawn, coordinator.plan.log_every
        self._progress.report(drawn, coordinator.seconds, report.loss, report.samples)
        if coordinator.marks.next_log <= drawn and coordinator.losses.unlogged:
            coordinator.marks.next_log = (drawn // every + 1) * every
            self._log()

    def _catch_up(self) -> None:
        """Log what came behind the last line of metrics, at the end of the run."""
        budget, last = self._coordinator.budget, self._coordinator.marks.last_log
        if budget.used_up and last[0] < budget.drawn and self._coordinator.losses.unlogged:
            self._log()

    def _log(self) -> None:
        coordinator = self._coordinator
        drawn, seconds, server = coordinator.budget.drawn, coordinator.seconds, coordinator.server
        samples_before, seconds_before = coordinator.marks.last_log
        values = {
            **coordinator.moment(),
            "loss": coordinator.losses.mean,
            "lr": coordinator.lr,
            "samples_per_second": (drawn - samples_before) / max(seconds - seconds_before, 1e-9),
            "wait_fraction": coordinator.wait_fraction,
            "bytes_sent_per_step": coordinator.bytes_sent_per_step,
            "gradients_refused": coordinator.ledger.count("gradient refused"),
            **coordinator.own_figures.take(),
        }
        if server is not None:
            values["staleness"] = server.staleness
            values["gradients"] = server.received
            values |= server.measures()
        coordinator.marks.last_log = (drawn, seconds)
        coordinator.losses = Losses()
        self._metrics.append("train", values)

    def log_rest(self) -> None:
        """Log the user's figures that came behind the last line of metrics, as of an epoch's end.

        In a line of their own kind: nothing else is known for it.
        """
        if own := self._coordinator.own_figures.take():
            self._metrics.append("own", {**self._coordinator.moment(), **own})

    def give_up(self) -> None:
        """Somebody else shows the progress from now on."""
        self._progress.give_up()

    def close(self) -> None:
        """Nothing more is drawn: leave the progress on the screen."""
        self._progress.close(self._coordinator.budget.drawn, self._coordinator.seconds)


@dataclass(frozen=True)
class RunReporter:
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
        role.server if isinstance(role, ServerAlgorithm) else None,
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
) -> RunReporter:
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
    return RunReporter(
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
