"""The training log: lines of metrics during training, and the progress display."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from math import isfinite
from typing import Any

from aladdin_mpi.control.budget import WorkerReport
from aladdin_mpi.hooks.progress import Progress, Style
from aladdin_mpi.hooks.recorder import Metrics
from aladdin_mpi.session.coordinator import Coordinator, RunEnd, RunHook
from aladdin_mpi.session.plan import Plan


@dataclass
class Losses:
    """The losses of the steps since the last line of metrics."""

    total: float = 0.0
    """Sum over ``samples``, those with a finite loss."""
    samples: int = 0
    unlogged: int = 0
    """All samples."""

    @property
    def mean(self) -> float | None:
        """The mean loss; None if no loss is finite."""
        return self.total / self.samples if self.samples else None

    def add(self, report: WorkerReport) -> None:
        """Add a worker's step."""
        self.unlogged += report.samples
        if report.samples and isfinite(report.loss):
            self.total += report.loss * report.samples
            self.samples += report.samples


class TrainingLog(RunHook):
    """A hook at rank 0 that writes lines of metrics at intervals, and displays the progress.

    Args:
        metrics: opened when the run begins, also for hooks that follow this one.
        keeps_all: keep all existing lines; otherwise lines after the present number of samples are
            dropped.
    """

    def __init__(
        self, metrics: Metrics, plan: Plan, style: Style, quiet: bool, keeps_all: bool
    ) -> None:
        self.metrics = metrics
        self._style: Style = style
        self._quiet = quiet
        self._keeps_all = keeps_all
        self._progress: Progress | None = None
        self._losses = Losses()
        self._next = plan.log_every
        self._last = (0, 0.0)
        """Samples and seconds at the last line."""

    def on_begin(self, run: Coordinator) -> None:
        """Open the metrics and display the progress, before other hooks that take seconds."""
        drawn = run.budget.drawn
        self.metrics.open(run.plan.total if self._keeps_all else drawn)
        trained = [line for line in self.metrics.lines if line["kind"] == "train"]
        if self._keeps_all and trained:
            samples, seconds = trained[-1]["samples"], trained[-1]["seconds"]
            self._next = max(self._next, samples + 1)
            self._last = max(self._last, (samples, seconds))
            run.catch_up(seconds)
        self._progress = Progress(
            run.plan.total,
            run.plan.step,
            drawn,
            run.seconds,
            run.state,
            self._style,
            self._quiet,
        )

    def on_report(self, run: Coordinator, report: WorkerReport) -> None:
        """Update the progress, and write a line if one is due."""
        self._losses.add(report)
        drawn, every = run.budget.drawn, run.plan.log_every
        if self._progress is not None:
            self._progress.report(drawn, run.seconds, report.loss, report.samples)
        if self._next <= drawn and self._losses.unlogged:
            self._next = (drawn // every + 1) * every
            self._log(run)

    def on_close(self, run: Coordinator) -> None:
        """Write a line on steps after the last line, at the end of the run."""
        if run.budget.used_up and self._last[0] < run.budget.drawn and self._losses.unlogged:
            self._log(run)

    def _log(self, run: Coordinator) -> None:
        drawn, seconds, server = run.budget.drawn, run.seconds, run.server
        samples_before, seconds_before = self._last
        values = {
            **run.moment(),
            "loss": self._losses.mean,
            "lr": run.lr,
            "samples_per_second": (drawn - samples_before) / max(seconds - seconds_before, 1e-9),
            "wait_fraction": run.wait_fraction,
            "bytes_sent_per_step": run.bytes_sent_per_step,
            "gradients_refused": run.ledger.count("gradient refused"),
            **run.take_figures(),
        }
        if server is not None:
            values["staleness"] = server.staleness
            values["gradients"] = server.received
        values |= run.measures()
        self._last, self._losses = (drawn, seconds), Losses()
        self.metrics.append("train", values)

    def on_end(self, ending: RunEnd) -> None:
        """Leave the progress on the screen, unless another rank displays it from now on."""
        if ending is RunEnd.COMPLETED or self._progress is None:
            return  # the summary follows
        if ending is RunEnd.SUSPENDED:
            self._progress.close()
        else:
            self._progress.give_up()
        self.metrics.close()

    def complete(self, run: Coordinator) -> None:
        """Write the user's figures after the last line, and end the progress display.

        Their line has a separate kind, because it has no other figures.
        """
        if own := run.take_figures():
            self.metrics.append("own", {**run.moment(), **own})
        if self._progress is not None:
            self._progress.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the log."""
        return {"loss": astuple(self._losses), "next_log": self._next, "last_log": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the position; earlier versions shared ``next`` with the evaluations."""
        self._losses = Losses(*state["loss"])
        self._next = state["next_log"] if "next_log" in state else state["next"][0]
        self._last = tuple(state["last_log"])
