"""A run as a row of segments, between which nothing is in flight and state can be saved.

The algorithm's code knows nothing of checkpoints: it trains until no more samples
are granted and leaves nothing in flight. What follows a checkpoint therefore
depends on the saved state alone, and a resumed run goes on as the uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.control.exchange import all_or_none, barrier, broadcast, gather
from aladdin_mpi.control.tags import COORDINATOR, Tag
from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.state import MergedState
from aladdin_mpi.flat.vectors import is_finite
from aladdin_mpi.process import stop_signal
from aladdin_mpi.run.checkpoint import CheckpointStore, LocalState
from aladdin_mpi.run.coordinator import Coordinator, RunEnd, RunHook
from aladdin_mpi.run.plan import Origin, Plan
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.group import RankLostError
from aladdin_mpi.worker.role import Role, TrainingWorker

SETTLE_SECONDS = 1.0
"""Virtual time for the messages around a checkpoint, and for a resumed run's set-up."""
STAGGER_SECONDS = 1e-6
"""Virtual time between two ranks' starts: their order must not be left to chance."""


class Segments:
    """Runs a rank's role from checkpoint to checkpoint.

    Args:
        coordinator: at rank 0.
        store: of checkpoints.
        config: the options that a run which resumes a checkpoint must share.
        plan: of the run.
        origin: of the run, which checkpoints name too.
        record_losses: called at the end of every segment, on every rank.
    """

    def __init__(
        self,
        transport: Transport,
        role: Role,
        coordinator: Coordinator | None,
        local: LocalState,
        store: CheckpointStore,
        config: dict[str, Any],
        plan: Plan,
        origin: Origin,
        record_losses: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._record_losses = record_losses
        # That of the set-up is not waiting in training.
        transport.traffic.waiting, transport.traffic.bytes_sent = 0.0, 0
        self._counted = (0.0, 0)
        self._role = role
        self._coordinator = coordinator
        self._local = local
        self._store = store
        self._about = {"ranks": transport.size, "engine": transport.engine, **config}
        self._drawn = 0
        self._moment = 0.0
        self._plan = plan
        self.origin = origin
        self._saved: int | None = None
        self.on_start: Callable[[], None] = lambda: None
        """Called when a segment starts: every rank is ready."""
        self.began_at = 0
        """Samples that all had drawn when the present segment began."""
        self.computed_before = 0
        """Samples that this worker had computed by then."""
        self.over = False
        """Whether the budget is used up."""
        self.suspended = 0
        """The signal that ended the run before its budget was used up, on every rank."""
        self.closed_by: int | None = None
        """The rank that has closed the run, on every rank; None: none has."""

    def run(self) -> None:
        """Train until the budget is used up, or the coordinator ends the run for a signal."""
        while not self._is_to_end:
            self._start_together()
            self.on_start()
            self._mark_beginning()
            if self._coordinator is not None:
                self._coordinator.open()
            self._role.run()
            if self._coordinator is not None:
                self._coordinator.close()
            with self.uncounted():
                lost = self._end()
            if lost is not None and not self._is_to_end:
                # Its share of the data goes to those who are left, while nothing is in flight.
                self._mark_beginning()
                raise RankLostError(lost)

    @property
    def _is_to_end(self) -> bool:
        return bool(self.over or self.suspended or self.closed_by is not None)

    def _end(self) -> int | None:
        """Agree on where the run is, and save it.

        Returns a worker that is lost, if those who are left can form a new group.
        """
        barrier(self._transport)
        self._record_losses()
        fact: Any = None
        if self._coordinator is not None:
            budget = self._coordinator.budget
            budget.close()
            suspended = 0 if budget.used_up else self._coordinator.suspended
            moment = self._transport.now() + SETTLE_SECONDS
            lost = min(self._transport.failed, default=None)
            if not self._transport.is_revoked(without=COORDINATOR):
                lost = None
            fact = (budget.drawn, budget.used_up, suspended, budget.closed_by, moment, lost)
        told = broadcast(self._transport, fact)
        self._drawn, self.over, self.suspended, self.closed_by, self._moment, lost = told
        if self._transport.models_time:
            # A worker's last report may come after the barrier: it belongs to the checkpoint.
            self._transport.sleep(until=self._moment)
        # A run that was suspended at once is where its last checkpoint is.
        # One that is closed may hold a part of a gradient.
        if self._drawn != self._saved and self.closed_by is None:
            self._save(self._store)
            self._saved = self._drawn
        return lost

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
        if isinstance(self._role, TrainingWorker):
            self.computed_before = self._role.worker.samples

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """For what is done between segments: its waiting and sending is not that of training."""
        traffic = self._transport.traffic
        self._counted = traffic.waiting, traffic.bytes_sent
        yield
        traffic.waiting, traffic.bytes_sent = self._counted

    # -- checkpoints ------------------------------------------------------------
    def _save(self, store: CheckpointStore) -> None:
        """Write a checkpoint, unless the last one is better.

        Raises UserError, RefusedError if one rank cannot.
        """
        transport, drawn, state = self._transport, self._drawn, self._state()
        doubts = gather(transport, self._role.doubt() or _not_finite(state["role"]))
        doubt = broadcast(transport, next(filter(None, doubts), ""))
        if doubt:
            if self._coordinator is not None:
                self._coordinator.ledger.checkpoint_skipped(drawn, doubt)
            return  # the last checkpoint stays: it is sound
        manifest = self.origin.as_json(self._plan.schedule_step)
        about = {**self._about, "moment": self._moment, **manifest}

        def first(step: Callable[[], None]) -> None:
            all_or_none(transport, lambda: step() if transport.rank == 0 else None)

        try:
            first(lambda: store.begin(drawn))
            entry = all_or_none(transport, lambda: store.write(drawn, transport.rank, state))
            entries = gather(transport, entry)
            first(lambda: store.commit(drawn, entries, about))
        except UserError:  # at rank 0, when every rank has tried
            store.discard(drawn)
            raise

    def _state(self) -> dict[str, Any]:
        waiting, bytes_sent = self._counted
        return {
            "role": self._role.state_dict(),
            "keeper": self._coordinator.state_dict() if self._coordinator else None,
            "moment": self._moment,
            "drawn": self._drawn,
            "waiting": waiting,
            "bytes_sent": bytes_sent,
            "local": self._local.state_dict(),
        }

    def part(self) -> dict[str, Any]:
        """What others need to know of this rank where the segment cannot be ended."""
        traffic = self._transport.traffic
        counted = {"waiting": traffic.waiting, "bytes_sent": traffic.bytes_sent}
        return {"role": self._role.state_dict(), **counted}

    @property
    def ended_at(self) -> int | None:
        """The samples of a run whose training is over; None: it is not."""
        return self._drawn if self.over else None

    def local_state(self) -> dict[str, Any]:
        """What is this rank's alone."""
        return self._local.state_dict()

    def restore(self, state: dict[str, Any] | None) -> None:
        """Take up the state that a checkpoint holds for this rank.

        A rank that had failed when it was written starts with new state; rank 0 never has. In
        the data it continues after the samples that had been granted to it.
        """
        granted = self._go_on_from(state)
        if self._coordinator is not None and granted is not None:
            self._coordinator.budget.granted_before = granted
        if state is None:
            if isinstance(self._role, TrainingWorker) and granted is not None:
                self._role.worker.samples = granted[self._transport.rank]
            return
        self._role.load_state_dict(state["role"])
        if self._coordinator is not None:
            self._coordinator.load_state_dict(state["keeper"])
        self._transport.traffic.waiting = state["waiting"]
        self._transport.traffic.bytes_sent = state["bytes_sent"]
        self._local.load_state_dict(state["local"])

    def _go_on_from(self, state: dict[str, Any] | None) -> list[int] | None:
        """From the moment that rank 0's part of a checkpoint names.

        Returns the samples granted to each rank; None: an earlier version wrote the checkpoint.
        """
        fact = None
        if state is not None:
            fact = [state["moment"], state["drawn"], (state["keeper"] or {}).get("granted")]
        granted: list[int] | None
        self._moment, self._drawn, granted = broadcast(self._transport, fact)
        self.over = self._drawn >= self._plan.total
        self._saved = self.began_at = self._drawn
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
        if self._coordinator is not None and state is not None:
            self._coordinator.load_state_dict(state["keeper"])
            self._coordinator.resize(merged)
        all_or_none(self._transport, lambda: self._role.resize(merged))
        self._count_on(merged)

    def take_over(
        self,
        drawn: int,
        merged: MergedState,
        known: dict[str, Any] | None = None,
        losses: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Go on where a former group has come apart.

        Args:
            drawn: the samples that its ranks have drawn and not given back.
            merged: its ranks, put together.
            known: what its coordinator knew, at rank 0.
            losses: likewise, see :meth:`.MpiFailures.take_over`.
        """
        transport = self._transport
        self._moment = broadcast(transport, transport.now() + SETTLE_SECONDS)
        self._drawn = drawn
        self.over = drawn >= self._plan.total
        if self._coordinator is not None and known is not None:
            self._coordinator.take_over(known, drawn, merged)
            self._coordinator.failures.take_over(losses)
        all_or_none(transport, lambda: self._role.resize(merged))
        self._count_on(merged)

    def _count_on(self, merged: MergedState) -> None:
        if isinstance(self._role, TrainingWorker):
            traffic, worker = self._transport.traffic, self._role.worker
            traffic.waiting = merged.carried("waiting", worker.index, worker.count)
            traffic.bytes_sent = int(merged.carried("bytes_sent", worker.index, worker.count))

    def load(self, resizes: bool = False) -> dict[str, Any] | None:
        """Read and check this rank's part of the last checkpoint; None: it has none.

        Args:
            resizes: the checkpoint may be of other numbers of ranks.

        Raises:
            UserError: it cannot be resumed by this run.
        """
        state = self._store.load(self._transport.rank, self._about, resizes)
        if state is not None and state["drawn"] > self._plan.total:
            raise UserError(
                f"--resume: expected a run at least as long as it was, {state['drawn']} samples, "
                f"got a length of {self._plan.total}; give more --epochs, --samples or --steps, or "
                "leave them out"
            )
        return state


def _not_finite(state: Any, name: str = "") -> str:
    """What in a role's state is not finite, or nothing."""
    if isinstance(state, Tensor):
        sound = not state.is_floating_point() or is_finite(state)
        return "" if sound else f"the state of a rank is not finite:{name}"
    items = state.items() if isinstance(state, dict) else ()
    return next(filter(None, (_not_finite(value, f"{name} {key}") for key, value in items)), "")


def traffic_in(part: Mapping[str, Any]) -> dict[str, Any]:
    """What a rank's part of a checkpoint, or :meth:`Segments.part`, says of its messages."""
    return {name: part.get(name, 0) for name in ("waiting", "bytes_sent")}


class Suspension(RunHook):
    """Reports a signal that this rank has received to the coordinator.

    The transport looks for it, whether the rank computes, serves or waits.

    Args:
        coordinator: at rank 0.
    """

    def __init__(self, transport: Transport, coordinator: Coordinator | None) -> None:
        self._transport = transport
        self._coordinator = coordinator
        self._told = False
        self._hooks = transport.poll_hooks
        if self._hooks is None:
            return
        stop_signal.install()
        if coordinator is not None:
            suspend = coordinator.suspend
            transport.on_message(
                Tag.SUSPEND, 8, lambda _, message: suspend(int(message.view(torch.int64)))
            )
        self._hooks.watch(self._look)

    def on_end(self, ending: RunEnd) -> None:
        """From now on signals change nothing."""
        if self._hooks is not None:
            self._hooks.unwatch(self._look)

    def _look(self) -> None:
        number = stop_signal.received()
        if number is None or self._told:
            return
        self._told = True
        if self._coordinator is not None:
            self._coordinator.suspend(number)
        else:
            self._transport.isend(torch.tensor([int(number)]), COORDINATOR, Tag.SUSPEND)
