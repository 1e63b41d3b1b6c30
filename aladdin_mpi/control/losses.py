"""The training loss of all workers, from their reports."""

from __future__ import annotations

from math import isfinite, nan


class GlobalLoss:
    """Mean loss of the gradients in every worker's newest message.

    ``value`` is NaN until all workers have reported, and with simulated computation.
    """

    def __init__(self, workers: int) -> None:
        self.newest: list[tuple[float, int]] = [(nan, 1)] * workers

    def report(self, worker: int, loss: float, gradients: int) -> None:
        """Record a worker's mean loss over its gradients; ignore NaN, if all were refused."""
        if isfinite(loss):
            self.newest[worker] = (loss, gradients)

    def exclude(self, worker: int) -> None:
        """Discard the last report of a worker that has failed."""
        self.newest[worker] = (0.0, 0)

    @property
    def value(self) -> float:
        """Mean over all gradients."""
        total = sum(loss * gradients for loss, gradients in self.newest)
        return total / max(1, sum(gradients for _, gradients in self.newest))
