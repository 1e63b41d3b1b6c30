"""One rank's training: a row of segments, between which nothing is in flight.

The algorithm's code knows nothing of checkpoints: it trains until no more samples
are granted and leaves nothing in flight. What follows a checkpoint therefore
depends on the saved state alone, and a resumed run goes on as the uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from aladdin_mpi.control.exchange import all_or_none, barrier, broadcast
from aladdin_mpi.control.tags import COORDINATOR
from aladdin_mpi.flat.state import MergedState
from aladdin_mpi.flat.vectors import is_finite
from aladdin_mpi.run.context import Context
from aladdin_mpi.run.coordinator import Coordinator, RunEnd, RunHook, SegmentEnd
from aladdin_mpi.run.failures import record_losses
from aladdin_mpi.run.local_state import LocalState
from aladdin_mpi.run.plan import Origin, Plan
from aladdin_mpi.transport.group import RankLostError
from aladdin_mpi.worker.role import Role, TrainingWorker

SETTLE_SECONDS = 1.0
"""Virtual time for the messages around a checkpoint, and for a resumed run's set-up."""
STAGGER_SECONDS = 1e-6
"""Virtual time between two ranks' starts: their order must not be left to chance."""


class Session:
    """Runs a rank's role segment by segment. What else belongs to a run is a hook.

    Attributes:
        coordinator: at rank 0.
        local: this rank's random state and buffers.
        hooks: called in this order.
        origin: who has trained so far.
        began_at: samples that all had drawn when the present segment began.
        computed_before: samples that this worker had computed by then.
        over: whether the budget is used up.
        suspended: the signal that ended the run before that, on every rank; 0: none.
        closed_by: the rank that has closed the run, on every rank; None: none has.
    """

    def __init__(
        self,
        context: Context,
        plan: Plan,
        role: Role,
        local: LocalState,
        coordinator: Coordinator | None,
        hooks: Sequence[RunHook],
        origin: Origin,
    ) -> None:
        self.context = context
        self.plan = plan
        self.role = role
        self.local = local
        self.coordinator = coordinator
        self.hooks = hooks
        self.origin = origin
        self.began_at = self.computed_before = 0
        self.over = False
        self.suspended = 0
        self.closed_by: int | None = None
        self._transport = context.transport
        # That of the set-up is not waiting in training.
        self._transport.traffic.waiting, self._transport.traffic.bytes_sent = 0.0, 0
        self._counted = (0.0, 0)
        self._drawn = 0
        self._moment = 0.0

    def run(self) -> None:
        """Train until the budget is used up, or the coordinator ends the run for a signal."""
        while not (self.over or self.suspended or self.closed_by is not None):
            self._start_together()
            for hook in self.hooks:
                hook.on_start()
            self._mark_beginning()
            if self.coordinator is not None:
                self.coordinator.open()
            self.role.run()
            if self.coordinator is not None:
                self.coordinator.close()
            with self.uncounted():
                end = self._settle()
                for hook in self.hooks:
                    hook.on_settled(end, self.coordinator)
            if end.lost is not None and not end.ends_run:
                # Its share of the data goes to those who are left, while nothing is in flight.
                self._mark_beginning()
                raise RankLostError(end.lost)

    def end(self, ending: RunEnd) -> None:
        """Training is over on this rank."""
        for hook in self.hooks:
            hook.on_end(ending)

    def _settle(self) -> SegmentEnd:
        """Agree on where the run is."""
        transport, coordinator = self._transport, self.coordinator
        barrier(transport)
        failures = None if coordinator is None else coordinator.failures
        record_losses(transport, self.role, self.context.servers, failures)
        fact: Any = None
        if coordinator is not None:
            budget = coordinator.budget
            budget.close()
            suspended = 0 if budget.used_up else coordinator.suspended
            moment = transport.now() + SETTLE_SECONDS
            can_regroup = transport.is_revoked(without=COORDINATOR)
            lost = min(transport.failed, default=None) if can_regroup else None
            fact = (budget.drawn, budget.used_up, suspended, budget.closed_by, moment, lost)
        self._drawn, self.over, self.suspended, self.closed_by, self._moment, lost = broadcast(
            transport, fact
        )
        if transport.models_time:
            # A worker's last report may come after the barrier: it belongs to the checkpoint.
            transport.sleep(until=self._moment)
        return SegmentEnd(
            self._drawn,
            self.over,
            self.suspended,
            self.closed_by,
            self._moment,
            lost,
            self.origin,
            self._state,
            self._doubt,
        )

    def _start_together(self) -> None:
        """Start when all are ready; in virtual time, when a resumed run starts as well."""
        transport = self._transport
        if transport.simulation is None:
            with self.uncounted():
                barrier(transport)
            return
        transport.sleep(until=self._moment + SETTLE_SECONDS + STAGGER_SECONDS * transport.rank)
        if transport.rank == 0:
            transport.simulation.reseed(self._drawn)

    def _mark_beginning(self) -> None:
        self.began_at = self._drawn
        if isinstance(self.role, TrainingWorker):
            self.computed_before = self.role.worker.samples

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """For what is done between segments: its waiting and sending is not that of training."""
        traffic = self._transport.traffic
        self._counted = traffic.waiting, traffic.bytes_sent
        yield
        traffic.waiting, traffic.bytes_sent = self._counted

    # -- state ------------------------------------------------------------------
    def _state(self) -> dict[str, Any]:
        waiting, bytes_sent = self._counted
        return {
            "role": self.role.state_dict(),
            "keeper": self.coordinator.state_dict() if self.coordinator else None,
            "moment": self._moment,
            "drawn": self._drawn,
            "waiting": waiting,
            "bytes_sent": bytes_sent,
            "local": self.local.state_dict(),
        }

    def _doubt(self, state: Mapping[str, Any]) -> str:
        return self.role.doubt() or _not_finite(state["role"])

    def part(self) -> dict[str, Any]:
        """Return what others need to know of this rank where the segment cannot be ended."""
        traffic = self._transport.traffic
        counted = {"waiting": traffic.waiting, "bytes_sent": traffic.bytes_sent}
        return {"role": self.role.state_dict(), **counted}

    @property
    def ended_at(self) -> int | None:
        """The samples of a run whose training is over; None: it is not."""
        return self._drawn if self.over else None

    def restore(self, state: dict[str, Any] | None) -> None:
        """Take up the state that a checkpoint holds for this rank.

        A rank that had failed when it was written starts with new state; rank 0 never has. In
        the data it continues after the samples that had been granted to it.
        """
        granted = self._go_on_from(state)
        if self.coordinator is not None and granted is not None:
            self.coordinator.budget.granted_before = granted
        if state is None:
            if isinstance(self.role, TrainingWorker) and granted is not None:
                self.role.worker.samples = granted[self._transport.rank]
            return
        self.role.load_state_dict(state["role"])
        if self.coordinator is not None:
            self.coordinator.load_state_dict(state["keeper"])
        self._transport.traffic.waiting = state["waiting"]
        self._transport.traffic.bytes_sent = state["bytes_sent"]
        self.local.load_state_dict(state["local"])

    def _go_on_from(self, state: dict[str, Any] | None) -> list[int] | None:
        """Go on from the moment that rank 0's part of a checkpoint names.

        Returns the samples granted to each rank; None: an earlier version wrote the checkpoint.
        """
        fact = None
        if state is not None:
            fact = [state["moment"], state["drawn"], (state["keeper"] or {}).get("granted")]
        granted: list[int] | None
        self._moment, self._drawn, granted = broadcast(self._transport, fact)
        self.over = self._drawn >= self.plan.total
        self.began_at = self._drawn
        return granted

    def resize(self, state: dict[str, Any] | None, merged: MergedState, origin: Origin) -> None:
        """Go on from a checkpoint of other numbers of ranks.

        Args:
            state: of its rank 0, at rank 0.
            merged: its ranks, put together.
            origin: of the run from here on.
        """
        self.origin = origin
        self._go_on_from(state)
        if self.coordinator is not None and state is not None:
            self.coordinator.load_state_dict(state["keeper"])
            self.coordinator.resize(merged)
        self._count_on(merged)

    def take_over(
        self,
        drawn: int,
        merged: MergedState,
        origin: Origin,
        known: dict[str, Any] | None = None,
        losses: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Go on where a former group has come apart.

        Args:
            drawn: the samples that its ranks have drawn and not given back.
            merged: its ranks, put together.
            origin: of the run from here on.
            known: what its coordinator knew, at rank 0.
            losses: likewise, see :meth:`.Failures.take_over`.
        """
        transport = self._transport
        self.origin = origin
        self._moment = broadcast(transport, transport.now() + SETTLE_SECONDS)
        self._drawn = drawn
        self.over = drawn >= self.plan.total
        if self.coordinator is not None and known is not None:
            self.coordinator.take_over(known, drawn, merged)
            self.coordinator.failures.take_over(losses)
        self._count_on(merged)

    def _count_on(self, merged: MergedState) -> None:
        all_or_none(self._transport, lambda: self.role.resize(merged))
        if isinstance(self.role, TrainingWorker):
            traffic, worker = self._transport.traffic, self.role.worker
            traffic.waiting = merged.carried("waiting", worker.index, worker.count)
            traffic.bytes_sent = int(merged.carried("bytes_sent", worker.index, worker.count))


def _not_finite(state: Any, name: str = "") -> str:
    """What in a role's state is not finite, or nothing."""
    if isinstance(state, Tensor):
        sound = not state.is_floating_point() or is_finite(state)
        return "" if sound else f"the state of a rank is not finite:{name}"
    items = state.items() if isinstance(state, dict) else ()
    return next(filter(None, (_not_finite(value, f"{name} {key}") for key, value in items)), "")


def traffic_in(part: Mapping[str, Any]) -> dict[str, Any]:
    """What a rank's part of a checkpoint, or :meth:`Session.part`, says of its messages."""
    return {name: part.get(name, 0) for name in ("waiting", "bytes_sent")}
