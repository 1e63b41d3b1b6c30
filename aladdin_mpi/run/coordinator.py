"""Rank 0's other duty: it grants samples, counts time, and keeps the books of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.control.budget import Budget, WorkerReport
from aladdin_mpi.control.exchange import packed, unpacked
from aladdin_mpi.control.ledger import Ledger
from aladdin_mpi.control.tags import COORDINATOR, Tag
from aladdin_mpi.data.images import SkipRecord
from aladdin_mpi.exchange.server import ParameterServer
from aladdin_mpi.run.failures import Failures
from aladdin_mpi.run.plan import Plan
from aladdin_mpi.run.progress import State
from aladdin_mpi.run.user_metrics import Means
from aladdin_mpi.transport.base import Request, Transport, surviving_ranks
from aladdin_mpi.worker.merged_state import MergedState

EVERY = 8
"""Reports of workers between two copies, ..."""
PAUSE = 0.05
"""... and seconds, at least: making one takes a third of a millisecond."""
MOST_BYTES = 1 << 16


def deputy_of(transport: Transport) -> int | None:
    """The first rank on another host than rank 0's, or else the next one; None: rank 0 is alone."""
    others = [rank for rank in surviving_ranks(transport) if rank]
    away = [rank for rank in others if transport.hosts[rank] != transport.hosts[0]]
    return next(iter(away or others), None)


class StandbyCoordinator:
    """This rank's side of the copies; there are none where a rank's death ends the job.

    Any rank may become the deputy, as the one before it is lost: so all listen.

    Args:
        look: at rank 0, what it knows now.
    """

    def __init__(self, transport: Transport, look: Callable[[], dict[str, Any]] | None) -> None:
        self._transport = transport
        self._look = look
        self._reports, self._sent_at = 0, 0.0
        self._newest: Tensor | None = None
        self._came_at = 0.0
        if not transport.survives:
            return
        transport.exclude_from_traffic(Tag.DEPUTY)
        if transport.rank != COORDINATOR:
            self._listen()

    def _listen(self) -> None:
        buffer = torch.empty(MOST_BYTES, dtype=torch.uint8)
        request = self._transport.irecv(buffer, COORDINATOR, Tag.DEPUTY)
        self._transport.when_done(request, lambda: self._take(request))

    def _take(self, request: Request) -> None:
        if request.failed is None and request.nbytes and request.buffer is not None:
            self._newest = request.buffer[: request.nbytes]
            self._came_at = self._transport.now()
            self._listen()

    @property
    def copy(self) -> dict[str, Any] | None:
        """The newest one, at a rank that is the deputy or has been; None elsewhere.

        Training has gone on since it came: so its ``seconds`` are those of now.
        """
        if self._newest is None:
            return None
        found: dict[str, Any] = unpacked(self._newest)
        if found["is_open"]:
            found["seconds"] += self._transport.now() - self._came_at
        return found

    def hear(self, report: WorkerReport) -> None:
        """At rank 0, of every report."""
        self._reports += 1
        if self._reports >= EVERY and self._transport.now() - self._sent_at >= PAUSE:
            self.send()

    def send(self) -> None:
        """At rank 0: send a copy now."""
        standby = deputy_of(self._transport) if self._transport.survives else None
        if self._look is None or standby is None:
            return
        self._reports, self._sent_at = 0, self._transport.now()
        data = packed(self._look())
        if len(data) <= MOST_BYTES:  # not so with thousands of refusals of many kinds
            self._transport.isend(data, standby, Tag.DEPUTY)


SHOWN = ("wire_bits", "pi")
"""Of a server's own figures, those in the progress."""


@dataclass
class Losses:
    """Of the steps since the last line of metrics."""

    total: float = 0.0
    """Summed over ``samples``, those with a finite loss."""
    samples: int = 0
    unlogged: int = 0
    """Samples in all."""

    @property
    def mean(self) -> float | None:
        """None: none is finite."""
        return self.total / self.samples if self.samples else None


@dataclass
class MetricMarks:
    """How far the metrics have come, kept by those who write them.

    Attributes:
        last_log: samples and seconds at the last line.
        next_log: samples at which a line is due; ``next_eval`` likewise.
        measuring: samples of the evaluation under way.
        measured: figures of the last evaluation; not in checkpoints.
    """

    next_log: int
    next_eval: int
    last_log: tuple[int, float] = (0, 0.0)
    measuring: int | None = None
    measured: Mapping[str, float] = field(default_factory=dict)


class Coordinator:
    """Grants samples, counts time, and adds up what workers report.

    It acts only when a message of a worker arrives, so that it works beside whatever
    rank 0 does for the algorithm. Who shows or writes what it knows listens to it.

    Args:
        lr: learning rate as a function of samples.
        workers: their number.
        server: rank 0's server, whose gradients and staleness are shown, if it has one.
        skips: rank 0's record of images that were skipped.
        lockstep: see :class:`Budget`.
        needed: see :class:`MpiFailures`; ``silence`` likewise.
    """

    def __init__(
        self,
        transport: Transport,
        plan: Plan,
        lr: Callable[[int], float],
        workers: int,
        server: ParameterServer | None,
        skips: SkipRecord,
        lockstep: Sequence[int] = (),
        needed: str | None = None,
        silence: float = 0.0,
    ) -> None:
        self._transport = transport
        self.plan = plan
        self._lr = lr
        self._workers = workers
        self._first_worker = transport.size - workers
        self.server = server
        self.budget = Budget(transport, plan.total, self._report, lockstep)
        self.ledger = Ledger(transport, self._first_worker, self.budget)
        self.failures = Failures(
            transport, self.budget, self._first_worker, needed, self.moment, silence
        )
        self.own_figures = Means()
        self.skips = skips
        self.marks = MetricMarks(plan.log_every, plan.eval_every)
        self.losses = Losses()
        self._on_report: list[Callable[[WorkerReport], None]] = []
        self._on_open: list[Callable[[], None]] = []
        self._on_close: list[Callable[[], None]] = []
        self._seconds = 0.0
        self._other_workers = 0.0
        """In periods with other numbers of workers: what theirs was more than that of as many."""
        self._opened: float | None = None
        self._waiting: dict[int, float] = {}
        self._sent: dict[int, int] = {}
        self._steps: dict[int, int] = {}
        self._rate: float | None = None
        self.suspended = 0
        """The signal after which the run is to end before its budget is used up."""

    def on_report(self, action: Callable[[WorkerReport], None]) -> None:
        """Have ``action`` called with every report, when it is counted."""
        self._on_report.append(action)

    def on_open(self, action: Callable[[], None]) -> None:
        """Have ``action`` called at the beginning of every segment."""
        self._on_open.append(action)

    def on_close(self, action: Callable[[], None]) -> None:
        """Have ``action`` called at the end of every segment, when time stands still."""
        self._on_close.append(action)

    @property
    def seconds(self) -> float:
        """Training time: without evaluations, checkpoints and set-up."""
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
        """Begin a segment: grant samples up to the next checkpoint."""
        every, drawn = self.plan.checkpoint_every, self.budget.drawn
        limit = (drawn // every + 1) * every if every else self.plan.total
        with self._transport.atomic():
            self.failures.note_earlier()
            is_ending = self.suspended or self.budget.closed_by is not None
            self.budget.open(drawn if is_ending else limit)
        self._opened = self._transport.now()
        for action in self._on_open:
            action()

    def suspend(self, number: int) -> None:
        """Grant nothing more, now and in later segments, because of this signal."""
        with self._transport.atomic():
            self.suspended = self.suspended or number
            self.budget.stop()

    def close(self) -> None:
        """End a segment: time stands still."""
        self._seconds, self._opened = self.seconds, None
        for action in self._on_close:
            action()

    # -- reports ----------------------------------------------------------------
    def _report(self, rank: int, report: WorkerReport) -> None:
        self._waiting[rank] = report.waiting
        self._sent[rank] = report.sent
        self._steps[rank] = report.steps
        self.losses.unlogged += report.samples
        if report.samples and isfinite(report.loss):
            self.losses.total += report.loss * report.samples
            self.losses.samples += report.samples
            self._rate = report.rate
        self._stop_in_time()
        for action in self._on_report:
            action(report)

    def _stop_in_time(self) -> None:
        limit, opened = self.plan.checkpoint_seconds, self._opened
        if limit and opened is not None and self._transport.now() - opened >= limit:
            self.budget.stop()

    @property
    def lr(self) -> float:
        """The learning rate that a worker reported last, or that of this moment."""
        return self._lr(self.budget.drawn) if self._rate is None else self._rate

    def state(self) -> State:
        """Where the run is, for the progress."""
        drawn, server = self.budget.drawn, self.server
        return State(
            samples=drawn,
            total=self.plan.total,
            epoch=drawn / self.plan.epoch,
            workers=self._workers,
            alive=sum(rank >= self._first_worker for rank in surviving_ranks(self._transport)),
            figures={**self.own_figures.so_far(), **self.marks.measured},
            lr=self.lr,
            waiting=self.wait_fraction if self._waiting else None,
            staleness=None if server is None else server.staleness,
            others={} if server is None else self._server_figures(server),
        )

    @staticmethod
    def _server_figures(server: ParameterServer) -> dict[str, float]:
        found = server.measures()
        return {name: found[name] for name in SHOWN if name in found}

    def moment(self) -> dict[str, Any]:
        """Where the run is: samples drawn, epochs, seconds."""
        drawn = self.budget.drawn
        return {"samples": drawn, "epoch": drawn / self.plan.epoch, "seconds": self.seconds}

    def knowledge(self) -> dict[str, Any]:
        """All that goes on when another rank keeps the books, at any moment."""
        with self._transport.atomic():
            return {
                **self.state_dict(),
                "seconds": self.seconds,
                "is_open": self._opened is not None,
                "suspended": int(self.suspended),
                "budget": self.budget.in_flight(),
            }

    # -- checkpoint ---------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """The state between two segments."""
        marks = self.marks
        return {
            "drawn": self.budget.drawn,
            "passed_over": self.budget.passed_over,
            "granted": self.budget.granted,
            "loss_scale": self.budget.loss_scale.state_dict(),
            "seconds": self._seconds,
            "waiting": self._waiting,
            "sent": self._sent,
            "steps": self._steps,
            "loss": (self.losses.total, self.losses.samples, self.losses.unlogged),
            "ledger": self.ledger.state_dict(),
            "last_log": marks.last_log,
            "next": (marks.next_log, marks.next_eval),
            "failures": self.failures.records,
            "measuring": marks.measuring,
            "rate": self._rate,
            "skipped": self.skips.state_dict(),
            "own": self.own_figures.state_dict(),
            "other_workers": self._other_workers,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state from :meth:`state_dict`."""
        self.budget.begin_at(state["drawn"], state.get("passed_over", 0))
        if "loss_scale" in state:
            self.budget.loss_scale.load_state_dict(state["loss_scale"])
        self._seconds = state["seconds"]
        self._waiting, self._sent = state["waiting"], state["sent"]
        self._steps = state["steps"]
        self.losses = Losses(*state["loss"])
        self.ledger.load_state_dict(state["ledger"])
        next_log, next_eval = state["next"]
        self.marks = MetricMarks(next_log, next_eval, state["last_log"], state["measuring"])
        self.failures.records[:0] = state["failures"]
        self._rate = state.get("rate")
        self.skips.load_state_dict(state.get("skipped", {}))
        if "own" in state:  # not in those of older runs
            self.own_figures.load_state_dict(state["own"])
        self._other_workers = state.get("other_workers", 0.0)

    def catch_up(self, samples: int, seconds: float) -> None:
        """Lines of metrics reach so far, which a former rank 0 has written: log behind them."""
        marks = self.marks
        marks.next_log = max(marks.next_log, samples + 1)
        marks.last_log = max(marks.last_log, (samples, seconds))
        self._seconds = max(self._seconds, seconds)

    def take_over(self, known: dict[str, Any], drawn: int, merged: MergedState) -> None:
        """Go on with the books of a former group.

        Args:
            known: see :meth:`knowledge`.
            drawn: samples that its ranks have drawn and not given back.
            merged: its ranks, put together.
        """
        self.load_state_dict({**known, "drawn": drawn})
        self.suspended = known["suspended"]
        if known["budget"]["total"] < self.plan.total:  # the loop has been left
            self.budget.total = drawn
        self.resize(merged)

    def resize(self, merged: MergedState) -> None:
        """Go on with the books of another number of workers; after :meth:`load_state_dict`."""
        n = self._workers
        ranks = enumerate(range(self._first_worker, self._transport.size))
        self._waiting, self._sent, self._steps = {}, {}, {}
        for worker, rank in ranks:
            self._waiting[rank] = merged.carried("waiting", worker, n)
            self._sent[rank] = int(merged.carried("bytes_sent", worker, n))
            self._steps[rank] = int(merged.carried("computed", worker, n))
        self._other_workers += self._seconds * (merged.workers - n)
