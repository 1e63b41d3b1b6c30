"""Rank 0's other duty: the budget, the metrics and the evaluations of the run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from torch import Tensor

from aladdin_mpi.control.budget import Budget, Report
from aladdin_mpi.control.ledger import Ledger
from aladdin_mpi.data.skipped import SkipRecord
from aladdin_mpi.parameter_server.server import ParameterServer
from aladdin_mpi.roles.former import Former
from aladdin_mpi.run.evaluation import Evaluator, Snapshots
from aladdin_mpi.run.failures import Failures
from aladdin_mpi.run.own_figures import Means
from aladdin_mpi.run.progress import Progress
from aladdin_mpi.run.recorder import Metrics
from aladdin_mpi.run.state_line import State
from aladdin_mpi.run.variance import ModelVariance
from aladdin_mpi.transport.base import Transport

SHOWN = ("wire_bits", "pi")
"""Of a server's own figures, those in the progress."""


@dataclass(frozen=True)
class Plan:
    """The run in samples: its length, an epoch, and how often something happens."""

    total: int
    epoch: int
    step: int
    """Of all workers that the run began with."""
    schedule_step: int
    """After which a scheduler goes on."""
    log_every: int
    eval_every: int
    """0: only at the end."""
    checkpoint_every: int
    """0: only at the end, or by time."""
    checkpoint_seconds: float
    """0: not by time."""


class Coordinator:
    """Grants samples, counts time, and writes down what workers report.

    It acts only when a message of a worker arrives, so that it works beside whatever
    rank 0 does for the algorithm.

    Args:
        lr: learning rate as a function of samples.
        workers: their number.
        server: rank 0's server, whose gradients and staleness are shown, if it has one.
        lockstep: see :class:`Budget`.
    """

    def __init__(
        self,
        transport: Transport,
        plan: Plan,
        lr: Callable[[int], float],
        workers: int,
        server: ParameterServer | None,
        lockstep: int = 0,
    ) -> None:
        self._transport = transport
        self.plan = plan
        self._lr = lr
        self._workers = workers
        self._server = server
        self.budget = Budget(transport, plan.total, self._report, lockstep)
        self.ledger = Ledger(transport, transport.size - workers)
        self.metrics: Metrics | None = None
        self.progress: Progress | None = None
        self.evaluator: Evaluator | None = None
        self.snapshots: Snapshots | None = None
        self.variance: ModelVariance | None = None
        self.failures: Failures | None = None
        self._seconds = 0.0
        self._other_workers = 0.0
        """In periods with other numbers of workers: what theirs was more than that of as many."""
        self._opened: float | None = None
        self._waiting: dict[int, float] = {}
        self._sent: dict[int, int] = {}
        self._steps: dict[int, int] = {}
        self._loss_sum = 0.0
        self._loss_samples = 0
        self.own_figures = Means()
        self.skips = SkipRecord()
        self.measured: Mapping[str, float] = {}
        """Of the last evaluation."""
        self._rate: float | None = None
        self._unlogged = 0
        self._last_log = (0, 0.0)
        self._next_log = plan.log_every
        self._next_eval = plan.eval_every
        self._moment: dict[str, Any] = {}
        self._lines: dict[int, dict[str, Any]] = {}
        self._lines_lock = threading.Lock()
        self._measuring: int | None = None
        self.suspended = 0
        """The signal after which the run is to end before its budget is used up."""

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
            self.budget.open(drawn if self.suspended else limit)
        self._opened = self._transport.now()

    def suspend(self, number: int) -> None:
        """Grant nothing more, now and in later segments, because of this signal."""
        with self._transport.atomic():
            self.suspended = self.suspended or number
            self.budget.stop()

    def close(self) -> None:
        """End a segment: time stands still. Log what came behind the last line of metrics."""
        self._seconds, self._opened = self.seconds, None
        drawn = self.budget.drawn
        if self.budget.used_up and self._last_log[0] < drawn and self._unlogged:
            self._log(drawn)

    # -- reports ----------------------------------------------------------------
    def _report(self, rank: int, report: Report) -> None:
        self._waiting[rank] = report.waiting
        self._sent[rank] = report.sent
        self._steps[rank] = report.steps
        self._unlogged += report.samples
        if report.samples and isfinite(report.loss):
            self._loss_sum += report.loss * report.samples
            self._loss_samples += report.samples
            self._rate = report.rate
        self._stop_in_time()
        drawn = self.budget.drawn
        if self.progress is not None:
            counts = report.samples if isfinite(report.loss) else 0
            self.progress.report(drawn, self.seconds, report.loss if counts else 0.0, counts)
        if self._next_log <= drawn and self._unlogged:
            self._next_log = (drawn // self.plan.log_every + 1) * self.plan.log_every
            self._log(drawn)
        if self.plan.eval_every and self._next_eval <= drawn < self.plan.total:
            self._next_eval = self._evaluation_behind(drawn)
            self._evaluate()

    def _stop_in_time(self) -> None:
        limit, opened = self.plan.checkpoint_seconds, self._opened
        if limit and opened is not None and self._transport.now() - opened >= limit:
            self.budget.stop()

    def _log(self, drawn: int) -> None:
        if self.metrics is None:
            return
        seconds = self.seconds
        samples_before, seconds_before = self._last_log
        values = {
            **self.moment(),
            "loss": self._loss_sum / self._loss_samples if self._loss_samples else None,
            "lr": self._present_lr(drawn),
            "samples_per_second": (drawn - samples_before) / max(seconds - seconds_before, 1e-9),
            "wait_fraction": self.wait_fraction,
            "bytes_sent_per_step": self.bytes_sent_per_step,
            "gradients_refused": self.ledger.count("gradient refused"),
            **self.own_figures.take(),
        }
        if self._server is not None:
            values["staleness"] = self._server.staleness
            values["gradients"] = self._server.received
            values |= self._server.measures()
        self._last_log = (drawn, seconds)
        self._loss_sum, self._loss_samples, self._unlogged = 0.0, 0, 0
        self.metrics.append("train", values)

    def _present_lr(self, drawn: int) -> float:
        return self._lr(drawn) if self._rate is None else self._rate

    def state(self) -> State:
        """Where the run is, for the progress."""
        drawn, server = self.budget.drawn, self._server
        first_worker = self._transport.size - self._workers
        return State(
            samples=drawn,
            total=self.plan.total,
            epoch=drawn / self.plan.epoch,
            workers=self._workers,
            alive=sum(rank >= first_worker for rank in self._transport.living),
            figures={**self.own_figures.so_far(), **self.measured},
            lr=self._present_lr(drawn),
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

    # -- evaluation ---------------------------------------------------------------
    def _evaluate(self) -> None:
        if self.evaluator is None or self.snapshots is None or self.variance is None:
            return
        if not (self.evaluator.busy or self.snapshots.busy):
            self._moment = self.moment()
            self._moment["gradients"] = self._server.received if self._server else 0
            self._measuring = self._moment["samples"]
            self.variance.take(self._moment["samples"])
            self.snapshots.take()

    def evaluate_copy(self, vector: Tensor) -> None:
        """A copy of the model, asked for when an evaluation was due, has come."""
        assert self.evaluator is not None
        self.evaluator.submit(vector, self._moment)

    def evaluated(self, moment: dict[str, Any], measured: Mapping[str, float]) -> None:
        """An evaluation of the model at ``moment`` is done."""
        self.measured = measured
        gradients = self._server.received if self._server else 0
        before = moment.pop("gradients", gradients)
        figures = {**measured, "gradients_meanwhile": gradients - before}
        self._complete(moment["samples"], {**moment, **figures})

    def take_variance(self, samples: int, value: float | None) -> None:
        """The variance among the workers' models is there; see :class:`ModelVariance`."""
        self._complete(samples, {"model_variance": value})

    def _complete(self, samples: int, figures: dict[str, Any]) -> None:
        """Write a line when both its parts are there, which come from two threads over MPI."""
        assert self.metrics is not None
        with self._lines_lock:
            line = self._lines.setdefault(samples, {})
            line |= figures
            if not {"model_variance", "gradients_meanwhile"} <= line.keys():
                return
            del self._lines[samples]
            variance = line.pop("model_variance")
            self.metrics.append("eval", {**line, "model_variance": variance})
            if self._measuring == samples:
                self._measuring = None

    def log_rest(self) -> None:
        """Log the user's figures that came behind the last line of metrics, as of an epoch's end.

        In a line of their own kind: nothing else is known for it.
        """
        assert self.metrics is not None
        if own := self.own_figures.take():
            self.metrics.append("own", {**self.moment(), **own})

    def end_evaluations(self) -> None:
        """Wait for the evaluation that is under way, and for no worker's answer any more."""
        assert self.evaluator is not None and self.variance is not None
        self.evaluator.wait()
        with self._transport.atomic():
            self.variance.give_up()

    def make_up_for_evaluation(self) -> None:
        """Evaluate soon, if the resumed run ended before its last evaluation did.

        But not where it was evaluated at its end already, and is longer now.
        """
        assert self.metrics is not None
        due, drawn = self._measuring, self.budget.drawn
        if due is not None and not self.metrics.has("eval", due):
            self._next_eval = due
        elif self.plan.eval_every and self.metrics.has("eval", drawn):
            self._next_eval = max(self._next_eval, self._evaluation_behind(drawn))
        self._measuring = None

    def _evaluation_behind(self, drawn: int) -> int:
        return (drawn // self.plan.eval_every + 1) * self.plan.eval_every

    # -- checkpoint ---------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """The state between two segments."""
        return {
            "drawn": self.budget.drawn,
            "passed_over": self.budget.passed_over,
            "seconds": self._seconds,
            "waiting": self._waiting,
            "sent": self._sent,
            "steps": self._steps,
            "loss": (self._loss_sum, self._loss_samples, self._unlogged),
            "ledger": self.ledger.state_dict(),
            "last_log": self._last_log,
            "next": (self._next_log, self._next_eval),
            "failures": self.failures.records if self.failures else [],
            "measuring": self._measuring,
            "rate": self._rate,
            "skipped": self.skips.state_dict(),
            "own": self.own_figures.state_dict(),
            "other_workers": self._other_workers,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state from :meth:`state_dict`."""
        self.budget.drawn = state["drawn"]
        self.budget.passed_over = state.get("passed_over", 0)
        self._seconds = state["seconds"]
        self._waiting, self._sent = state["waiting"], state["sent"]
        self._steps = state["steps"]
        self._loss_sum, self._loss_samples, self._unlogged = state["loss"]
        self.ledger.load_state_dict(state["ledger"])
        self._last_log = state["last_log"]
        self._next_log, self._next_eval = state["next"]
        if self.failures is not None:
            self.failures.records = state["failures"]
        self._measuring = state["measuring"]
        self._rate = state.get("rate")
        self.skips.load_state_dict(state.get("skipped", {}))
        if "own" in state:  # not in those of older runs
            self.own_figures.load_state_dict(state["own"])
        self._other_workers = state.get("other_workers", 0.0)

    def resize(self, former: Former) -> None:
        """Go on with the books of another number of workers; after :meth:`load_state_dict`."""
        n = self._workers
        ranks = enumerate(range(self._transport.size - n, self._transport.size))
        self._waiting, self._sent, self._steps = {}, {}, {}
        for worker, rank in ranks:
            self._waiting[rank] = former.carried("waiting", worker, n)
            self._sent[rank] = int(former.carried("bytes_sent", worker, n))
            self._steps[rank] = int(former.carried("computed", worker, n))
        self._other_workers += self._seconds * (former.workers - n)
