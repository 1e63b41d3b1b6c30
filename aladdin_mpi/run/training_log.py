"""Rank 0's lines on the training itself: in the metrics, and for the eye."""

from __future__ import annotations

from aladdin_mpi.control.budget import Report
from aladdin_mpi.run.coordinator import Coordinator, Losses
from aladdin_mpi.run.progress import Progress
from aladdin_mpi.run.recorder import Metrics


class TrainingLog:
    """Writes a line of metrics every so many samples, and shows the progress.

    Args:
        coordinator: whose reports it hears.
    """

    def __init__(self, coordinator: Coordinator, metrics: Metrics, progress: Progress) -> None:
        self._coordinator = coordinator
        self._metrics = metrics
        self._progress = progress
        coordinator.on_report(self._hear)
        coordinator.on_close(self._catch_up)

    def _hear(self, report: Report) -> None:
        coordinator = self._coordinator
        drawn, every = coordinator.budget.drawn, coordinator.plan.log_every
        self._progress.report(drawn, coordinator.seconds, report.loss, report.samples)
        if coordinator.marks.next_log <= drawn and coordinator.losses.unlogged:
            coordinator.marks.next_log = (drawn // every + 1) * every
            self._log()

    def _catch_up(self) -> None:
        """Log what came behind the last line of metrics, at the end of the run."""
        budget, last = self._coordinator.budget, self._coordinator.marks.last_log
        if budget.used_up and last[0] < budget.drawn and self._coordinator.losses.unlogged:
            self._log()

    def _log(self) -> None:
        coordinator = self._coordinator
        drawn, seconds, server = coordinator.budget.drawn, coordinator.seconds, coordinator.server
        samples_before, seconds_before = coordinator.marks.last_log
        values = {
            **coordinator.moment(),
            "loss": coordinator.losses.mean,
            "lr": coordinator.lr,
            "samples_per_second": (drawn - samples_before) / max(seconds - seconds_before, 1e-9),
            "wait_fraction": coordinator.wait_fraction,
            "bytes_sent_per_step": coordinator.bytes_sent_per_step,
            "gradients_refused": coordinator.ledger.count("gradient refused"),
            **coordinator.own_figures.take(),
        }
        if server is not None:
            values["staleness"] = server.staleness
            values["gradients"] = server.received
            values |= server.measures()
        coordinator.marks.last_log = (drawn, seconds)
        coordinator.losses = Losses()
        self._metrics.append("train", values)

    def log_rest(self) -> None:
        """Log the user's figures that came behind the last line of metrics, as of an epoch's end.

        In a line of their own kind: nothing else is known for it.
        """
        if own := self._coordinator.own_figures.take():
            self._metrics.append("own", {**self._coordinator.moment(), **own})

    def give_up(self) -> None:
        """Somebody else shows the progress from now on."""
        self._progress.give_up()

    def close(self) -> None:
        """Nothing more is drawn: leave the progress on the screen."""
        self._progress.close(self._coordinator.budget.drawn, self._coordinator.seconds)
