"""One rank of a run, from its start to its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aladdin_mpi.control.exchange import broadcast
from aladdin_mpi.control.heartbeats import Heartbeats
from aladdin_mpi.errors import SUSPENDED_STATUS
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm
from aladdin_mpi.exchange.server_replica import StoredReplicas
from aladdin_mpi.hooks.evaluation import Evaluations
from aladdin_mpi.hooks.skip_reports import SkipReports
from aladdin_mpi.hooks.standby import Standby
from aladdin_mpi.hooks.training_log import TrainingLog
from aladdin_mpi.hooks.user_metrics import UserMetrics
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.process import console, guard
from aladdin_mpi.process.files import shown
from aladdin_mpi.run.run_folder import OpenFolder
from aladdin_mpi.run.summary import summarise
from aladdin_mpi.run.trained_model import write_parts
from aladdin_mpi.session.context import Context, collect_model, warn_of_differences
from aladdin_mpi.session.coordinator import RunEnd
from aladdin_mpi.session.session import Session
from aladdin_mpi.worker.role import TrainingWorker
from aladdin_mpi.worker.worker import Worker


@dataclass(frozen=True)
class Rank:
    """A session with the components that open before it and close after it.

    Attributes:
        evaluations: one of the session's hooks; so are ``user_metrics``, ``skips`` and
            ``standby``.
        log: the training log, a hook at rank 0; None elsewhere.
        replicas: of other ranks' servers; None without replication.
    """

    session: Session
    folder: OpenFolder
    optimizer: Optimizer
    heartbeats: Heartbeats
    evaluations: Evaluations
    user_metrics: UserMetrics
    skips: SkipReports
    standby: Standby
    log: TrainingLog | None
    replicas: StoredReplicas | None

    @property
    def context(self) -> Context:
        """The context that all components of this rank share."""
        return self.session.context

    @property
    def worker(self) -> Worker:
        """The worker of this rank. Raises AttributeError on a server."""
        if not isinstance(self.session.role, TrainingWorker):
            raise AttributeError("a server has no worker")
        return self.session.role.worker

    def rate(self) -> float:
        """Return the learning rate of a worker's present step, of the first parameter group."""
        return self.worker.lr * self.optimizer.rate

    def suspend(self) -> None:
        """Release everything after the run was suspended, and saved."""
        session = self.session
        session.end(RunEnd.SUSPENDED)
        remedy = f"resume with: --resume {shown(self.folder.path)}"
        self._print(f"stopped by {session.suspended}", remedy)
        self._release()
        self.context.transport.close(SUSPENDED_STATUS)

    def give_up(self) -> None:
        """End this rank's part in its group, which is revoked."""
        self.session.end(RunEnd.REVOKED)
        self.heartbeats.give_up()
        self.session.role.close()

    def abandon(self) -> None:
        """Close the run before its end, on every rank."""
        self.session.end(RunEnd.CLOSED)
        if not self.context.options.quiet:
            self._print("closed", guard.remedy())
        self._release()

    def _print(self, event: str, remedy: str) -> None:
        """Print at rank 0 the sample at which the run has ended."""
        if self.session.coordinator is not None:
            drawn, total = self.session.coordinator.budget.drawn, self.session.plan.total
            console.say(f"aladdin_mpi: {event} at sample {drawn} of {total}; {remedy}")

    def complete(self) -> dict[str, Any]:
        """Complete the model on all ranks, evaluate it, and return the summary at rank 0."""
        session, context, role = self.session, self.context, self.session.role
        session.end(RunEnd.COMPLETED)
        waiting = context.transport.traffic.waiting  # what follows is not training
        if isinstance(role, ServerAlgorithm):
            role.complete()
        self.evaluations.note_variance()
        own = None
        is_alone = context.workers == 1 or context.islands.size > 1
        if context.algorithm.takes_writes and not is_alone and context.is_real:
            assert isinstance(role, TrainingWorker)  # there are no servers
            own = role.own_model.clone()
        model = collect_model(context, role)
        if own is not None and model is not None:
            warn_of_differences(context, own, model)
        self.evaluations.complete_statistics()
        if session.coordinator is not None:
            session.coordinator.failures.complete()
        self.evaluations.measure_divided(model)
        write_parts(context, self.folder.path)
        summary = summarise(
            context,
            role,
            session.coordinator,
            self.log,
            self.evaluations,
            self.user_metrics,
            self.skips,
            self.folder.path,
            model,
            waiting,
        )
        self.evaluations.share_statistics()
        if context.transport.is_revoked(without=0):
            broadcast(context.transport, None)  # rank 0 has written all results
        self._release()
        return summary

    def _release(self) -> None:
        guard.excuse = str  # it must not outlive the islands of this run
        self.heartbeats.close()
        self.evaluations.close()
        self.session.role.close()
        self.optimizer.close()
        self.folder.release()
