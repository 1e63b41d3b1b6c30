"""Coordination by rank 0: it grants samples, measures time, and computes the run's metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import isfinite
from typing import Any

from aladdin_mpi.control.budget import Budget, WorkerReport
from aladdin_mpi.control.refusals import Ledger
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm
from aladdin_mpi.flat.state import MergedState
from aladdin_mpi.session.context import Context
from aladdin_mpi.session.failures import Failures
from aladdin_mpi.session.plan import Origin, Plan
from aladdin_mpi.worker.role import COMPUTED, LEFT_OUT, Role

SHOWN = ("wire_bits", "pi")
"""The algorithm's figures to show in the progress line."""


class RunEnd(Enum):
    """The way in which a rank's part in a run ends."""

    COMPLETED = "trained to the end"
    SUSPENDED = "ended by a signal, and saved"
    CLOSED = "closed by the user's program before its end"
    REVOKED = "continued by another group of ranks"


@dataclass(frozen=True)
class SegmentEnd:
    """The agreement of all ranks at the end of a segment, when nothing is in flight.

    Attributes:
        origin: the ranks that have trained so far.
        state: returns this rank's state, for a checkpoint.
        doubt: returns a reason not to save such a state; empty without one.
        drawn: samples that the workers have drawn.
        is_last: the budget is used up.
        suspended: the reason why the run is saved and ends before that; empty: it does not.
        closed_by: the rank that has closed the run; None: not closed.
        moment: the earliest start of the next segment, in seconds of the engine's clock.
        lost: a failed rank, if the others can form a new group; None: none has failed.
    """

    origin: Origin
    state: Callable[[], dict[str, Any]]
    doubt: Callable[[Mapping[str, Any]], str]
    drawn: int
    is_last: bool
    suspended: str
    closed_by: int | None
    moment: float
    lost: int | None

    @property
    def ends_run(self) -> bool:
        """Whether no segment follows."""
        return bool(self.is_last or self.suspended or self.closed_by is not None)


class RunHook:
    """A component of a run other than training. Methods do nothing unless overridden.

    Every rank calls ``on_start`` and ``on_settled`` for each segment, and ``on_end``. Rank 0 calls
    the methods with a :class:`Coordinator`: ``on_begin``, and for each segment ``on_open``,
    ``on_report`` for each report of a worker, and ``on_close``. A hook saves its own state, under
    its own keys.
    """

    def on_start(self) -> None:
        """Handle the start of a segment, when every rank is ready."""

    def on_settled(self, end: SegmentEnd, run: Coordinator | None) -> None:
        """Handle the end of a segment on every rank; ``run`` is None except on rank 0."""

    def on_begin(self, run: Coordinator) -> None:
        """Handle the start of training, after the run's state has been restored."""

    def on_open(self, run: Coordinator) -> None:
        """Handle the start of a segment."""

    def on_report(self, run: Coordinator, report: WorkerReport) -> None:
        """Handle a worker's report of a step, which is counted already."""

    def on_close(self, run: Coordinator) -> None:
        """Handle the end of a segment; time stops until the next one."""

    def on_failure(self, run: Coordinator, rank: int) -> None:
        """Handle the failure of a rank."""

    def on_end(self, ending: RunEnd) -> None:
        """Handle the end of training on this rank."""

    def figures(self) -> Mapping[str, float]:
        """Return figures to show in the progress line."""
        return {}

    def take_figures(self) -> Mapping[str, float]:
        """Return figures for the next line of metrics, each only once."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the hook's state for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint, which has the keys of all hooks."""


@dataclass(frozen=True)
class State:
    """A snapshot of a run for the progress line.

    Attributes:
        samples: samples drawn by all workers, of ``total``.
        rate: recent samples per second.
        loss: recent mean loss.
        figures: measured values, and values logged by the training loop.
        waiting: share of their time that workers waited.
        staleness: mean staleness in gradients.
        others: further figures of the algorithm, by name.
        surviving: number of surviving workers, of ``workers``.
        left: remaining seconds.
        seconds: training time so far.
    """

    samples: int
    total: int
    epoch: float
    workers: int
    surviving: int
    seconds: float = 0.0
    rate: float | None = None
    loss: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    lr: float | None = None
    waiting: float | None = None
    staleness: float | None = None
    others: Mapping[str, float] = field(default_factory=dict)
    left: float | None = None


class Coordinator:
    """Rank 0's coordination: grants samples, measures time, and sums up workers' reports.

    It acts only on messages of workers, so that it does not interfere with rank 0's role in the
    algorithm. Hooks show and write its figures.

    Args:
        lr: learning rate as a function of samples.
        role: rank 0's role; if it is a server, its gradients and staleness are shown.
        hooks: called in this order.
    """

    def __init__(
        self,
        context: Context,
        role: Role,
        plan: Plan,
        lr: Callable[[int], float],
        hooks: Sequence[RunHook],
    ) -> None:
        self._transport = transport = context.transport
        self.plan = plan
        self._lr = lr
        self._workers = context.workers
        self._first_worker = context.servers
        self.server = role.server if isinstance(role, ServerAlgorithm) else None
        self.measures = role.measures
        lockstep = context.leaders if context.algorithm.lockstep else ()
        self.budget = Budget(transport, plan.total, self._report, lockstep, context.unit)
        self._round_steps = context.algorithm.round_steps(context.options)
        self.ledger = Ledger(transport, self._first_worker, self.budget)
        self.failures = Failures(context, self.budget, self.moment)
        self._hooks = hooks
        self._has_begun = False
        transport.on_failure(self._lose)
        self._seconds = 0.0
        self._other_workers = 0.0
        """Correction of the workers' time for periods with other numbers of workers."""
        self.left_out = 0
        """Samples that workers left out before the last change of their number."""
        self._opened: float | None = None
        self._waiting: dict[int, float] = {}
        self._sent: dict[int, int] = {}
        self._steps: dict[int, int] = {}
        self._rate: float | None = None
        self.suspended = ""
        """Why the run is saved and ends before its budget is used up; empty: it does not."""

    def begin(self) -> None:
        """Start or resume training; call after :meth:`load_state_dict`."""
        for hook in self._hooks:
            hook.on_begin(self)
        self._has_begun = True

    def _lose(self, rank: int) -> None:
        if self._has_begun:
            for hook in self._hooks:
                hook.on_failure(self, rank)

    @property
    def seconds(self) -> float:
        """Training time, without evaluations, checkpoints and set-up."""
        if self._opened is None:
            return self._seconds
        return self._seconds + self._transport.now() - self._opened

    @property
    def worker_seconds(self) -> float:
        """The sum of the workers' training times."""
        return self.seconds * self._workers + self._other_workers

    @property
    def wait_fraction(self) -> float:
        """Share of the training time that workers have spent waiting."""
        whole = self.worker_seconds
        return sum(self._waiting.values()) / whole if whole else 0.0

    @property
    def bytes_sent_per_step(self) -> float:
        """Mean bytes that a worker has sent for a step."""
        steps = sum(self._steps.values())
        return sum(self._sent.values()) / steps if steps else 0.0

    # -- segments -------------------------------------------------------------
    def open(self) -> None:
        """Start a segment: grant samples up to the next checkpoint."""
        every, drawn = self.plan.checkpoint_every, self.budget.drawn
        limit = (drawn // every + 1) * every if every else self.plan.total
        with self._transport.atomic():
            self.failures.note_earlier()
            is_ending = self.suspended or self.budget.closed_by is not None
            self.budget.open(drawn if is_ending else limit)
        self._opened = self._transport.now()
        for hook in self._hooks:
            hook.on_open(self)

    def suspend(self, reason: str) -> None:
        """Stop granting samples, now and in later segments, for this reason."""
        with self._transport.atomic():
            self.suspended = self.suspended or reason
            self.budget.stop()

    def close(self) -> None:
        """End a segment: time stops."""
        self._seconds, self._opened = self.seconds, None
        for hook in self._hooks:
            hook.on_close(self)

    # -- reports ----------------------------------------------------------------
    def _report(self, rank: int, report: WorkerReport) -> None:
        self._waiting[rank] = report.waiting
        self._sent[rank] = report.sent
        self._steps[rank] = report.steps
        if report.samples and isfinite(report.loss):
            self._rate = report.rate
        limit, opened = self.plan.checkpoint_seconds, self._opened
        if limit and opened is not None and self._transport.now() - opened >= limit:
            self.budget.stop_after(self._round_steps)
        for hook in self._hooks:
            hook.on_report(self, report)

    @property
    def gradients(self) -> int:
        """Gradients that rank 0's server has received; 0 without servers."""
        return self.server.received if self.server else 0

    def take_figures(self) -> dict[str, float]:
        """Return the hooks' figures for the next line of metrics."""
        return {name: v for hook in self._hooks for name, v in hook.take_figures().items()}

    @property
    def lr(self) -> float:
        """The learning rate of the last worker's report, or the schedule's current one."""
        return self._lr(self.budget.drawn) if self._rate is None else self._rate

    def state(self) -> State:
        """Return a snapshot of the run for the progress line."""
        drawn, server = self.budget.drawn, self.server
        return State(
            samples=drawn,
            total=self.plan.total,
            epoch=drawn / self.plan.epoch,
            seconds=self.seconds,
            workers=self._workers,
            surviving=self.failures.surviving_workers,
            figures={name: value for hook in self._hooks for name, value in hook.figures().items()},
            lr=self.lr,
            waiting=self.wait_fraction if self._waiting else None,
            staleness=None if server is None else server.staleness,
            others={name: value for name, value in self.measures().items() if name in SHOWN},
        )

    def moment(self) -> dict[str, Any]:
        """Return the run's position: samples drawn, epochs, seconds."""
        drawn = self.budget.drawn
        return {"samples": drawn, "epoch": drawn / self.plan.epoch, "seconds": self.seconds}

    def knowledge(self) -> dict[str, Any]:
        """Return the state with which another rank can continue as coordinator, at any moment."""
        with self._transport.atomic():
            return {
                **self.state_dict(),
                "seconds": self.seconds,
                "is_open": self._opened is not None,
                "suspended": self.suspended,
                "budget": self.budget.in_flight(),
            }

    # -- checkpoint ---------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the state between two segments."""
        state = {
            "drawn": self.budget.drawn,
            "passed_over": self.budget.passed_over,
            "granted": self.budget.granted,
            "loss_scale": self.budget.loss_scale.state_dict(),
            "seconds": self._seconds,
            "waiting": self._waiting,
            "sent": self._sent,
            "steps": self._steps,
            "ledger": self.ledger.state_dict(),
            "failures": [{**each} for each in self.failures.records],
            "rate": self._rate,
            "other_workers": self._other_workers,
            "left_out": self.left_out,
        }
        for hook in self._hooks:
            state |= hook.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`."""
        self.budget.begin_at(state["drawn"], state.get("passed_over", 0))
        if "loss_scale" in state:
            self.budget.loss_scale.load_state_dict(state["loss_scale"])
        self._seconds = state["seconds"]
        self._waiting, self._sent, self._steps = state["waiting"], state["sent"], state["steps"]
        self.ledger.load_state_dict(state["ledger"])
        # Copies: the next group may have to continue from the same state.
        self.failures.records[:0] = [{**each} for each in state["failures"]]
        self._rate = state.get("rate")
        self._other_workers = state.get("other_workers", 0.0)
        self.left_out = state.get("left_out", 0)
        for hook in self._hooks:
            hook.load_state_dict(state)

    def catch_up(self, seconds: float) -> None:
        """Set the training time so far to at least ``seconds``, from earlier lines of metrics."""
        self._seconds = max(self._seconds, seconds)

    def take_over(self, known: dict[str, Any], drawn: int, merged: MergedState) -> None:
        """Continue from a previous group's :meth:`knowledge`; see :meth:`.Session.take_over`."""
        self.load_state_dict({**known, "drawn": drawn})
        self.suspended = known["suspended"]
        if known["budget"]["total"] < self.plan.total:  # the loop has ended early
            self.budget.total = drawn
        self.resize(merged)

    def resize(self, merged: MergedState) -> None:
        """Continue with another number of workers; call after :meth:`load_state_dict`."""
        n = self._workers
        self._waiting, self._sent, self._steps = {}, {}, {}
        for worker, rank in enumerate(range(self._first_worker, self._transport.size)):
            self._waiting[rank] = merged.carried("waiting", worker, n)
            self._sent[rank] = int(merged.carried("bytes_sent", worker, n))
            self._steps[rank] = int(merged.carried(COMPUTED, worker, n))
        self._other_workers += self._seconds * (merged.workers - n)
        self.left_out += int(merged.total(LEFT_OUT))
