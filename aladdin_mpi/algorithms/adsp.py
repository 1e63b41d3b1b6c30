"""ADSP, adaptive synchronous parallel (Hu, Wang, Wu; AAAI 2020): equal commits, no waiting.

A worker trains by itself and commits what it has accumulated, U_i, from time to time; the
server adds ``U_i / M`` to the model and sends it back. Workers of unequal speed commit
equally often and so differ in the steps between: they never wait for each other.
"""

from __future__ import annotations

from typing import Any

from aladdin_mpi.algorithms.adsp_schedule import Schedule
from aladdin_mpi.compression.codec import GradientCodec
from aladdin_mpi.config.algorithm_options import AdspOptions
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.parameter_server.answering import AnsweringServer
from aladdin_mpi.parameter_server.local_difference import DifferenceWorker
from aladdin_mpi.parameter_server.server import Arrival, ParameterServer
from aladdin_mpi.roles.worker import Worker


class AdspWorker(DifferenceWorker):
    """Local SGD; commit when the time since the last commit says so.

    It goes on while the answer is under way, and then takes the model with what it has
    accumulated since. The time from commit to commit is thus the scheduler's, and the
    paper's ``O_i``, which a worker there spends on a commit, is nothing to be subtracted.
    """

    def __init__(self, worker: Worker, optimizer: Optimizer, wire: GradientCodec) -> None:
        super().__init__(worker, optimizer, wire, wire)
        self.interval = 0.0
        self.committed = 0.0
        self.awaited = 0

    def open(self) -> None:
        """A segment begins."""
        super().open()
        self.committed, self.awaited = self.worker.transport.now(), 0

    def is_due(self) -> bool:
        """At the end of the step that is nearest to the time, if the last commit is answered."""
        self.awaited -= self.inbox.blend_into(self.x)
        if self.inbox.notes:
            (self.interval,) = self.inbox.notes
        passed = self.worker.transport.now() - self.committed
        return self.awaited == 0 and passed + self.step_seconds / 2 >= self.interval

    def exchange(self) -> None:
        """Commit ``U_i``, with its loss and the time of a step."""
        self.push(self.loss, self.step_seconds)
        self.committed = self.worker.transport.now()
        self.awaited = len(self.worker.layout.buckets)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next segment depends on."""
        return {**super().state_dict(), "notes": self.inbox.notes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state from :meth:`state_dict`."""
        super().load_state_dict(state)
        self.inbox.notes = state["notes"]


class AdspServer(AnsweringServer):
    """``W <- W + U_i / M``, answered with W; the first server is the scheduler too."""

    def __init__(self, server: ParameterServer, options: AdspOptions) -> None:
        super().__init__(server, optimizer=None)
        first = server.transport.rank == 0
        self.schedule = Schedule(self.n, options) if first else None

    def run(self) -> None:
        """Serve until every worker has ended the segment."""
        now = self.server.transport.now
        if self.schedule is not None:
            self.schedule.open(now())
        super().run()
        if self.schedule is not None:
            self.schedule.close(now())

    def apply(self, arrival: Arrival) -> None:
        """``W <- W + U_i / M``."""
        if self.schedule is not None and arrival.bucket is self.server.buckets[0]:
            loss, step_seconds = arrival.notes
            now = self.server.transport.now()
            self.schedule.commit(arrival.worker, now, loss, arrival.count, step_seconds)
        arrival.add_to(self.server.values[arrival.bucket.index], 1 / self.n)

    def answer(self, arrival: Arrival) -> None:
        """Send W, and when to commit next."""
        notes: tuple[float, ...] = ()
        if self.schedule is not None:
            notes = (self.schedule.interval(arrival.worker, self.server.transport.now()),)
        self.server.send_model(arrival.worker, arrival.bucket, notes=notes)

    def ended(self, worker: int) -> None:
        """The scheduler counts no longer on a worker that has failed."""
        if self.schedule is not None and self.server.has_failed(worker):
            self.schedule.exclude(worker)

    def facts(self) -> dict[str, Any]:
        """The rate that was found, for the summary."""
        return {} if self.schedule is None else {"adsp": self.schedule.facts()}

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next segment depends on."""
        schedule = self.schedule.state_dict() if self.schedule is not None else None
        return {**super().state_dict(), "schedule": schedule}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state from :meth:`state_dict`."""
        super().load_state_dict(state)
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
