"""One rank of a run, from its start to its end."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from aladdin_mpi.control.exchange import broadcast
from aladdin_mpi.control.heartbeats import Heartbeats
from aladdin_mpi.data.images import SkipReports
from aladdin_mpi.errors import SUSPENDED_STATUS
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm
from aladdin_mpi.exchange.server_replica import StoredReplicas
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.process import console, guard
from aladdin_mpi.run.context import Context, collect_model, share_buffers, warn_of_differences
from aladdin_mpi.run.coordinator import StandbyCoordinator
from aladdin_mpi.run.divided_evaluation import DividedEvaluation
from aladdin_mpi.run.evaluation import Snapshots
from aladdin_mpi.run.measurement import BatchNormRecalibrator, Evaluate
from aladdin_mpi.run.plan import Plan
from aladdin_mpi.run.reporter import RunReporter
from aladdin_mpi.run.run_folder import OpenFolder
from aladdin_mpi.run.segments import Segments, Suspension
from aladdin_mpi.run.summary import Trained, summarise
from aladdin_mpi.run.user_metrics import UserMetrics
from aladdin_mpi.run.variance import ModelVariance
from aladdin_mpi.worker.role import Role, TrainingWorker
from aladdin_mpi.worker.worker import Worker


@dataclass(frozen=True)
class Measuring:
    """How the model is measured and compared, on every rank.

    Attributes:
        seen: calls of the module, for batch norm; None: nobody needs them.
        evaluate: None: no evaluations.
        divided: None: workers have no part in it.
    """

    seen: BatchNormRecalibrator | None
    evaluate: Evaluate | None
    divided: DividedEvaluation | None
    snapshots: Snapshots
    variance: ModelVariance


@dataclass(frozen=True)
class Rank:
    """Worker or server, with its segments and, at rank 0, the books."""

    context: Context
    plan: Plan
    folder: OpenFolder
    optimizer: Optimizer
    role: Role
    skips: SkipReports
    figures: UserMetrics
    measuring: Measuring
    segments: Segments
    suspension: Suspension
    heartbeats: Heartbeats
    standby: StandbyCoordinator
    kept: StoredReplicas | None
    """Mirrors of servers; None: nobody has any."""
    books: RunReporter | None
    """At rank 0."""

    @property
    def worker(self) -> Worker:
        """A worker's.

        Raises:
            AttributeError: this rank is a server.
        """
        if not isinstance(self.role, TrainingWorker):
            raise AttributeError("a server has no worker")
        return self.role.worker

    def rate(self) -> float:
        """The learning rate of a worker's present step; that of the first group."""
        return self.worker.lr * self.optimizer.rate

    @property
    def evaluating(self) -> bool:
        """Whether an evaluation goes on in a thread of its own."""
        divided = self.measuring.divided
        if divided is not None and divided.busy:
            return True
        return self.books is not None and self.books.evaluations.busy

    def suspend(self) -> None:
        """A signal has ended the run, which is saved: close the books and go."""
        self.suspension.close()
        if self.books is not None:
            self.books.log.close()
            self.books.metrics.close()
            name = signal.Signals(self.segments.suspended).name
            console.say(
                f"aladdin_mpi: stopped by {name} at sample "
                f"{self.books.coordinator.budget.drawn} of {self.plan.total}; resume with: "
                f"--resume {self.folder.path}"
            )
        self._leave()
        self.context.transport.close(SUSPENDED_STATUS)

    def give_up(self) -> None:
        """The group has come apart: this rank's part in it ends where it is."""
        self.suspension.close()
        self.heartbeats.give_up()
        seen, divided = self.measuring.seen, self.measuring.divided
        if seen is not None:
            seen.close()
        if divided is not None:
            divided.close()
        if self.books is not None:
            self.books.give_up()
        self.role.close()

    def abandon(self) -> None:
        """The run is closed before its end, on every rank: give everything back."""
        self.suspension.close()
        if self.measuring.seen is not None:
            self.measuring.seen.close()
        if self.books is not None:
            self.books.give_up()
            self.books.evaluations.wait()
            if not self.context.options.quiet:
                drawn = self.books.coordinator.budget.drawn
                console.say(
                    f"aladdin_mpi: closed at sample {drawn} of {self.plan.total}; {guard.remedy()}"
                )
        self._leave()

    def complete(self) -> dict[str, Any]:
        """Complete the model everywhere, measure it, write the books; the summary at rank 0."""
        context, seen = self.context, self.measuring.seen
        self.suspension.close()
        waiting = context.transport.traffic.waiting  # what follows is not training
        if isinstance(self.role, ServerAlgorithm):
            self.role.complete()
        variance = self.measuring.variance.at_end() if context.is_real else None
        takes_writes = context.algorithm.takes_writes and context.workers > 1
        own = self._copy_own_model() if takes_writes and context.is_real else None
        model = collect_model(context, self.role)
        if own is not None and model is not None:
            warn_of_differences(context, own, model)
        if seen is not None:
            seen.complete()
            share_buffers(context, context.servers)
        if self.books is not None:
            self.books.coordinator.failures.complete()
        divided, measured = self.measuring.divided, None
        if divided is not None and model is not None:
            measured = divided.at_end(model, context.options.timeout)
        late, may_skip = self.figures.late, self.skips.are_possible
        trained = Trained(model, variance, waiting, late, seen, measured, may_skip)
        summary = summarise(context, self.role, self.books, self.folder.path, trained)
        if seen is not None:
            share_buffers(context, 0)
        if context.transport.is_revoked(without=0):
            broadcast(context.transport, None)  # rank 0 has written all: nobody is needed any more
        self._leave()
        return summary

    def _copy_own_model(self) -> Tensor:
        assert isinstance(self.role, TrainingWorker)  # there are no servers
        return self.role.own_model.clone()

    def _leave(self) -> None:
        self.heartbeats.close()
        if self.measuring.divided is not None:
            self.measuring.divided.close()
        self.role.close()
        self.optimizer.close()
        self.folder.release()
