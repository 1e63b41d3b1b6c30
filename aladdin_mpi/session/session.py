"""One rank's training: a sequence of segments, between which nothing is in flight.

The algorithm's code is unaware of checkpoints: it trains until no more samples are
granted, and leaves nothing in flight. The training after a checkpoint therefore depends
only on the saved state, and a resumed run continues like an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.accelerator import is_accelerator
from aladdin_mpi.control.exchange import all_or_none, barrier, broadcast
from aladdin_mpi.control.tags import COORDINATOR
from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.replica import copy_tensors
from aladdin_mpi.flat.state import MergedState
from aladdin_mpi.flat.vectors import is_finite
from aladdin_mpi.session.context import Context
from aladdin_mpi.session.coordinator import Coordinator, RunEnd, RunHook, SegmentEnd
from aladdin_mpi.session.failures import record_losses
from aladdin_mpi.session.plan import Origin, Plan
from aladdin_mpi.transport.group import RankLostError
from aladdin_mpi.worker.role import Role, TrainingWorker
from aladdin_mpi.worker.step import Compute
from aladdin_mpi.worker.worker import RandomState

SETTLE_SECONDS = 1.0
"""Simulated time for the messages at a checkpoint, and for the set-up of a resumed run."""
STAGGER_SECONDS = 1e-6
"""Simulated time between two ranks' starts, which makes their order deterministic."""


class LocalState:
    """One rank's random state and buffers, and the ``user``'s own state, for checkpoints.

    If several ranks share this process, as in simulations, each computes with its own random
    state.
    """

    def __init__(self, context: Context, user: dict[str, Any]) -> None:
        self._user = user
        self._replica = context.whole
        self._shared = context.transport.shares_process
        self._device = context.whole.parameters.device
        self._random = RandomState(self._device)

    def share_buffers(self, state: dict[str, Any]) -> None:
        """Restore only the buffers of a state from :meth:`state_dict`."""
        copy_tensors(state["buffers"], self._replica.buffers())

    def seed(self, number: int) -> None:
        """Start with this seed."""
        if is_accelerator(self._device):
            torch.manual_seed(number)
        else:  # torch.manual_seed() would look for accelerators, and keep the stack for each
            torch.default_generator.manual_seed(number)
        self._random.keep()

    def computing(self, compute: Compute) -> Compute:
        """Return ``compute``, using this rank's random state."""
        return self._random.during(compute) if self._shared else compute

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two segments."""
        if not self._shared:
            self._random.keep()
        check_plain(self._user, "run.state")
        return {
            "random": self._random.host,
            "device_random": self._random.device,
            "buffers": self._replica.buffers(),
            "user": self._user,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`."""
        self._user.clear()
        self._user.update(state.get("user", {}))
        self._random.set(state["random"], state.get("device_random"))
        if not self._shared:
            self._random.restore()
        self.share_buffers(state)


@dataclass(eq=False)
class Session:
    """Segment-by-segment execution of a rank's role; hooks do everything else in a run.

    Attributes:
        coordinator: the coordinator, on rank 0.
        hooks: called in this order.
        origin: the ranks that have trained so far.
        began_at: samples drawn by all ranks when the current segment started.
        computed_before: samples computed by this worker by then.
        over: whether the budget is used up.
        suspended: why the run was saved and ended before that, on every rank; empty: it was not.
        closed_by: the rank that has closed the run, on every rank; None: not closed.
    """

    context: Context
    plan: Plan
    role: Role
    local: LocalState
    coordinator: Coordinator | None
    hooks: Sequence[RunHook]
    origin: Origin

    def __post_init__(self) -> None:
        self.began_at = self.computed_before = 0
        self.over = False
        self.suspended = ""
        self.closed_by: int | None = None
        self._transport = self.context.transport
        # Waiting during set-up does not count as waiting in training.
        self._transport.traffic.waiting, self._transport.traffic.bytes_sent = 0.0, 0
        self._counted = (0.0, 0)
        self._drawn = 0
        self._moment = 0.0

    @property
    def is_interrupted(self) -> bool:
        """Whether the run was suspended or closed before its samples were used up."""
        return bool(self.suspended) or self.closed_by is not None

    def run(self) -> None:
        """Train until the budget is used up, or the coordinator ends the run."""
        while not (self.over or self.is_interrupted):
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
                # Its share of the data is redistributed among surviving ranks.
                self._mark_beginning()
                raise RankLostError(end.lost)

    def end(self, ending: RunEnd) -> None:
        """End training on this rank."""
        for hook in self.hooks:
            hook.on_end(ending)

    def _settle(self) -> SegmentEnd:
        """Agree with all ranks on the run's position."""
        transport, coordinator = self._transport, self.coordinator
        barrier(transport)
        failures = None if coordinator is None else coordinator.failures
        record_losses(self.context, self.role, failures)
        fact: Any = None
        if coordinator is not None:
            budget = coordinator.budget
            budget.close()
            suspended = "" if budget.used_up else coordinator.suspended
            moment = transport.now() + SETTLE_SECONDS
            can_regroup = transport.is_revoked(without=COORDINATOR)
            lost = min(transport.failed, default=None) if can_regroup else None
            fact = (budget.drawn, budget.used_up, suspended, budget.closed_by, moment, lost)
        end = SegmentEnd(self.origin, self._state, self._doubt, *broadcast(transport, fact))
        self._drawn, self.over, self.suspended = end.drawn, end.is_last, end.suspended
        self.closed_by, self._moment = end.closed_by, end.moment
        if transport.models_time:
            # A worker's last report may arrive after the barrier; the checkpoint must include it.
            transport.sleep(until=self._moment)
        return end

    def _start_together(self) -> None:
        """Start when all ranks are ready; in simulations at the same time as a resumed run."""
        transport = self._transport
        # A group that takes over keeps the state of the former one until all are ready.
        if transport.simulation is None or self.context.numbers:
            with self.uncounted():
                barrier(transport)
        if transport.simulation is None:
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
        """Exclude waiting and sending in the block, between segments, from the counters."""
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
        """Return the part of this rank's state that others need if the segment cannot be ended."""
        waiting, sent = self._transport.traffic.waiting, self._transport.traffic.bytes_sent
        return {"role": self.role.state_dict(), "waiting": waiting, "bytes_sent": sent}

    @property
    def ended_at(self) -> int | None:
        """Final number of samples; None if training is not over."""
        return self._drawn if self.over else None

    def restore(self, state: dict[str, Any] | None) -> None:
        """Restore this rank's state from a checkpoint.

        A rank that had failed when it was written starts with a new state; rank 0 never has. Its
        data continue after the samples that had been granted to it.
        """
        granted = self._continue_from(state)
        if self.coordinator is not None and granted is not None:
            self.coordinator.budget.granted_before = granted
        if state is not None:
            self._load(state)
        elif isinstance(self.role, TrainingWorker) and granted is not None:
            divided = self.context.islands.divided(granted)
            self.role.worker.samples = divided[self._transport.rank]
        self._mark_beginning()

    def _load(self, state: dict[str, Any]) -> None:
        self.role.load_state_dict(state["role"])
        if self.coordinator is not None:
            self.coordinator.load_state_dict(state["keeper"])
        self._transport.traffic.waiting = state["waiting"]
        self._transport.traffic.bytes_sent = state["bytes_sent"]
        self.local.load_state_dict(state["local"])

    def _continue_from(self, state: dict[str, Any] | None) -> list[int] | None:
        """Continue from the position in rank 0's part of a checkpoint.

        Returns the samples granted to each rank; None: an earlier version wrote the checkpoint.
        """
        fact = None
        if state is not None:
            fact = [state["moment"], state["drawn"], (state["keeper"] or {}).get("granted")]
        granted: list[int] | None
        self._moment, self._drawn, granted = broadcast(self._transport, fact)
        self.over = self._drawn >= self.plan.total
        return granted

    def resize(
        self,
        state: dict[str, Any] | None,
        merged: MergedState,
        origin: Origin,
        of_all: MergedState,
    ) -> None:
        """Continue from a checkpoint of other numbers of ranks, merged into ``merged``.

        Args:
            state: of its rank 0, on rank 0.
            merged: of the ranks that trained this rank's lane.
            origin: of the run from here on.
            of_all: has the counts of all workers, on rank 0.
        """
        self.origin = origin
        self._continue_from(state)
        if self.coordinator is not None and state is not None:
            self.coordinator.load_state_dict(state["keeper"])
            self.coordinator.resize(of_all)
        self._distribute(merged)
        self._mark_beginning()

    def take_over(
        self,
        drawn: int,
        merged: MergedState,
        origin: Origin,
        of_all: MergedState,
        is_over: bool,
        known: dict[str, Any] | None = None,
        losses: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Continue after a previous group was revoked.

        Args:
            drawn: the samples that its ranks have drawn and not returned.
            merged: of the ranks that trained this rank's lane.
            origin: of the run from here on.
            of_all: has the counts of all workers.
            is_over: whether its last segment has ended; otherwise a segment follows, if only to
                write the checkpoint.
            known: its coordinator's knowledge, on rank 0.
            losses: on rank 0, see :meth:`.Failures.take_over`.
        """
        transport = self._transport
        self.origin = origin
        self._moment = broadcast(transport, transport.now() + SETTLE_SECONDS)
        self._drawn = drawn
        self.over = is_over
        if self.coordinator is not None and known is not None:
            self.coordinator.take_over(known, drawn, of_all)
            self.coordinator.failures.take_over(losses)
        self._distribute(merged)
        self._mark_beginning()

    def _distribute(self, merged: MergedState) -> None:
        all_or_none(self._transport, lambda: self.role.resize(merged))
        if isinstance(self.role, TrainingWorker):
            traffic, worker = self._transport.traffic, self.role.worker
            traffic.waiting = merged.carried("waiting", worker.index, worker.count)
            traffic.bytes_sent = int(merged.carried("bytes_sent", worker.index, worker.count))


def _not_finite(state: Any, name: str = "") -> str:
    """Return a description of the first value that is not finite in a role's state, or ""."""
    if isinstance(state, Tensor):
        is_valid = not state.is_floating_point() or is_finite(state)
        return "" if is_valid else f"the state of a rank is not finite:{name}"
    items = state.items() if isinstance(state, dict) else ()
    return next(filter(None, (_not_finite(value, f"{name} {key}") for key, value in items)), "")


def traffic_in(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the traffic totals in a rank's part of a checkpoint or in :meth:`Session.part`."""
    return {name: part.get(name, 0) for name in ("waiting", "bytes_sent")}


def check_plain(value: object, place: str) -> None:
    """Raise UserError if a checkpoint, which contains no code, cannot store ``value``."""
    if isinstance(value, dict):
        for key, each in value.items():
            check_plain(each, f"{place}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            check_plain(each, f"{place}[{number}]")
    elif not (value is None or isinstance(value, (Tensor, bool, int, float, str))):
        raise UserError(
            f"{place}: expected tensors, numbers, strings, and lists and dicts of these, got "
            f"{type(value).__name__}; store its contents, such as a state_dict()"
        )
