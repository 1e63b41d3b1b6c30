"""Rank 0's evaluations of the run: when they are due, and their lines of metrics."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from aladdin_mpi.control.budget import Report
from aladdin_mpi.run.coordinator import Coordinator
from aladdin_mpi.run.evaluator import Evaluator
from aladdin_mpi.run.recorder import Metrics
from aladdin_mpi.run.snapshots import Snapshots
from aladdin_mpi.run.variance import ModelVariance
from aladdin_mpi.transport.base import Transport


class Evaluations:
    """Asks for a copy of the model when an evaluation is due, and writes down what it measures.

    Args:
        coordinator: whose reports it hears.
        evaluator: None: nothing is measured.
    """

    def __init__(
        self,
        transport: Transport,
        coordinator: Coordinator,
        metrics: Metrics,
        evaluator: Evaluator | None,
        snapshots: Snapshots,
        variance: ModelVariance,
    ) -> None:
        self._transport = transport
        self._coordinator = coordinator
        self._metrics = metrics
        self._evaluator = evaluator
        self._snapshots = snapshots
        self._variance = variance
        self._lines: dict[int, dict[str, Any]] = {}
        self._lines_lock = threading.Lock()
        self._make_up()
        coordinator.on_report(self._hear)

    @property
    def busy(self) -> bool:
        """Whether an evaluation goes on in a thread of its own."""
        return self._evaluator is not None and self._evaluator.busy

    def _make_up(self) -> None:
        """Evaluate soon, if the resumed run ended before its last evaluation did.

        But not where it was evaluated at its end already, and is longer now.
        """
        marks = self._coordinator.marks
        due, drawn = marks.measuring, self._coordinator.budget.drawn
        if due is not None and not self._metrics.has("eval", due):
            marks.next_eval = due
        elif self._coordinator.plan.eval_every and self._metrics.has("eval", drawn):
            marks.next_eval = max(marks.next_eval, self._behind(drawn))
        marks.measuring = None

    def _behind(self, drawn: int) -> int:
        every = self._coordinator.plan.eval_every
        return (drawn // every + 1) * every

    # -- during training ----------------------------------------------------------
    def _hear(self, report: Report) -> None:
        marks, plan = self._coordinator.marks, self._coordinator.plan
        drawn = self._coordinator.budget.drawn
        if plan.eval_every and marks.next_eval <= drawn < plan.total:
            marks.next_eval = self._behind(drawn)
            if self._evaluator is not None:
                self._begin(self._evaluator)

    def _begin(self, evaluator: Evaluator) -> None:
        if evaluator.busy or self._snapshots.busy:
            return
        moment = {**self._coordinator.moment(), "gradients": self._gradients()}
        self._coordinator.marks.measuring = samples = moment["samples"]
        self._variance.take(samples, self._take_variance)
        self._snapshots.take(lambda vector: evaluator.submit(vector, moment, self._take_figures))

    def _gradients(self) -> int:
        server = self._coordinator.server
        return server.received if server else 0

    def _take_figures(self, moment: dict[str, Any], measured: Mapping[str, float]) -> None:
        """An evaluation of the model at ``moment`` is done."""
        self._coordinator.marks.measured = measured
        gradients = self._gradients()
        before = moment.pop("gradients", gradients)
        figures = {**measured, "gradients_meanwhile": gradients - before}
        self._complete(moment["samples"], {**moment, **figures})

    def _take_variance(self, samples: int, value: float | None) -> None:
        """The variance among the workers' models is there; see :class:`ModelVariance`."""
        self._complete(samples, {"model_variance": value})

    def _complete(self, samples: int, figures: dict[str, Any]) -> None:
        """Write a line when both its parts are there, which come from two threads over MPI."""
        with self._lines_lock:
            line = self._lines.setdefault(samples, {})
            line |= figures
            if not {"model_variance", "gradients_meanwhile"} <= line.keys():
                return
            del self._lines[samples]
            variance = line.pop("model_variance")
            self._metrics.append("eval", {**line, "model_variance": variance})
            if self._coordinator.marks.measuring == samples:
                self._coordinator.marks.measuring = None

    def wait(self) -> None:
        """Wait for the evaluation under way."""
        if self._evaluator is not None:
            self._evaluator.wait()

    # -- at the end of the run ------------------------------------------------------
    def at_end(
        self, model: Tensor, variance: float | None, measured: Mapping[str, float] | None
    ) -> dict[str, float] | None:
        """Measure the trained model; None: nothing measures it.

        ``variance`` is that among the workers' models. The evaluation that is under way is waited
        for, and no worker's answer any more. ``measured`` is what the workers have measured, if
        they have.
        """
        if self._evaluator is None:
            return None
        self._evaluator.wait()
        with self._transport.atomic():
            self._variance.give_up()
        if measured is None:
            measured = self._evaluator.measure(model)
        drawn = self._coordinator.budget.drawn
        if not self._metrics.has("eval", drawn):
            self._take_variance(drawn, variance)
            self._take_figures(self._coordinator.moment(), measured)
        return dict(measured)

    def buffers(self) -> list[Tensor]:
        """Those of the model that was measured; none where nothing is."""
        return [] if self._evaluator is None else list(self._evaluator.module.buffers())
