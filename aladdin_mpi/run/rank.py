"""One rank of a run, from its start to its end."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from aladdin_mpi.control.exchange import broadcast
from aladdin_mpi.control.heartbeats import Heartbeats
from aladdin_mpi.errors import SUSPENDED_STATUS
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm
from aladdin_mpi.exchange.server_replica import StoredReplicas
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.process import console, guard
from aladdin_mpi.run.context import Context, collect_model, share_buffers, warn_of_differences
from aladdin_mpi.run.coordinator import Coordinator, RunEnd, RunHook
from aladdin_mpi.run.divided_evaluation import DividedEvaluation
from aladdin_mpi.run.evaluation import Evaluations
from aladdin_mpi.run.measurement import BatchNormRecalibrator
from aladdin_mpi.run.plan import Plan
from aladdin_mpi.run.run_folder import OpenFolder
from aladdin_mpi.run.segments import Segments
from aladdin_mpi.run.skip_reports import SkipReports
from aladdin_mpi.run.standby import Standby
from aladdin_mpi.run.summary import Trained, summarise
from aladdin_mpi.run.training_log import TrainingLog
from aladdin_mpi.run.user_metrics import UserMetrics
from aladdin_mpi.run.variance import ModelVariance
from aladdin_mpi.worker.role import Role, TrainingWorker
from aladdin_mpi.worker.worker import Worker


@dataclass(frozen=True)
class Rank:
    """A worker or a server with what surrounds its training.

    Attributes:
        coordinator: at rank 0.
        hooks: all of this rank's, in the order in which they are called.
        user_metrics: one of them; so are ``skips`` and ``standby``.
        log: likewise, at rank 0; so is ``evaluations``.
        recalibrator: of batch norm's statistics; None: nothing needs it.
        divided: evaluations divided among the workers; None: they have no part in them.
        replicas: of other ranks' servers; None: there are none.
    """

    context: Context
    plan: Plan
    folder: OpenFolder
    optimizer: Optimizer
    role: Role
    coordinator: Coordinator | None
    segments: Segments
    heartbeats: Heartbeats
    hooks: Sequence[RunHook]
    user_metrics: UserMetrics
    skips: SkipReports
    standby: Standby
    log: TrainingLog | None
    evaluations: Evaluations | None
    recalibrator: BatchNormRecalibrator | None
    divided: DividedEvaluation | None
    variance: ModelVariance
    replicas: StoredReplicas | None

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
        if self.divided is not None and self.divided.busy:
            return True
        return self.evaluations is not None and self.evaluations.busy

    def suspend(self) -> None:
        """A signal has ended the run, which is saved: end everything and leave."""
        self._end(RunEnd.SUSPENDED)
        if self.coordinator is not None:
            name = signal.Signals(self.segments.suspended).name
            console.say(
                f"aladdin_mpi: stopped by {name} at sample "
                f"{self.coordinator.budget.drawn} of {self.plan.total}; resume with: "
                f"--resume {self.folder.path}"
            )
        self._leave()
        self.context.transport.close(SUSPENDED_STATUS)

    def give_up(self) -> None:
        """The group is revoked: this rank's part in it ends where it is."""
        self._end(RunEnd.REVOKED)
        self.heartbeats.give_up()
        if self.divided is not None:
            self.divided.close()
        self.role.close()

    def abandon(self) -> None:
        """The run is closed before its end, on every rank: give everything back."""
        self._end(RunEnd.CLOSED)
        if self.coordinator is not None and not self.context.options.quiet:
            drawn = self.coordinator.budget.drawn
            console.say(
                f"aladdin_mpi: closed at sample {drawn} of {self.plan.total}; {guard.remedy()}"
            )
        self._leave()

    def complete(self) -> dict[str, Any]:
        """Complete the model everywhere, measure it, write all results; the summary at rank 0."""
        context, recalibrator = self.context, self.recalibrator
        self._end(RunEnd.COMPLETED)
        waiting = context.transport.traffic.waiting  # what follows is not training
        if isinstance(self.role, ServerAlgorithm):
            self.role.complete()
        variance = self.variance.at_end() if context.is_real else None
        takes_writes = context.algorithm.takes_writes and context.workers > 1
        own = self._copy_own_model() if takes_writes and context.is_real else None
        model = collect_model(context, self.role)
        if own is not None and model is not None:
            warn_of_differences(context, own, model)
        if recalibrator is not None:
            recalibrator.complete()
            share_buffers(context, context.servers)
        if self.coordinator is not None:
            self.coordinator.failures.complete()
        measured = None
        if self.divided is not None and model is not None:
            measured = self.divided.at_end(model, context.options.timeout)
        trained = Trained(
            model, variance, waiting, self.user_metrics, self.skips, recalibrator, measured
        )
        summary = summarise(
            context,
            self.role,
            self.coordinator,
            self.log,
            self.evaluations,
            self.folder.path,
            trained,
        )
        if recalibrator is not None:
            share_buffers(context, 0)
        if context.transport.is_revoked(without=0):
            broadcast(context.transport, None)  # rank 0 has written all: no rank is needed any more
        self._leave()
        return summary

    def _copy_own_model(self) -> Tensor:
        assert isinstance(self.role, TrainingWorker)  # there are no servers
        return self.role.own_model.clone()

    def _end(self, ending: RunEnd) -> None:
        for hook in self.hooks:
            hook.on_end(ending)
        if self.recalibrator is not None and ending in (RunEnd.CLOSED, RunEnd.REVOKED):
            self.recalibrator.close()

    def _leave(self) -> None:
        self.heartbeats.close()
        if self.divided is not None:
            self.divided.close()
        self.role.close()
        self.optimizer.close()
        self.folder.release()
