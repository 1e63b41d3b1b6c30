"""What the training asks of an algorithm: a worker's part and a server's part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class Role(ABC):
    """An algorithm's part on one rank. It is run for one segment after another.

    Between segments nothing is in flight: all that an algorithm remembers then is
    in :meth:`state_dict`.
    """

    @abstractmethod
    def run(self) -> None:
        """Take part in a segment, to its end, and leave nothing in flight."""

    @abstractmethod
    def counts(self) -> dict[str, int]:
        """Totals of gradients for the accounts of the run."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All state, as tensors, numbers, strings, lists and dicts."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state from :meth:`state_dict`."""


class TrainingWorker(Role):
    """A rank that computes gradients."""


class Server(Role):
    """A rank that keeps a part of the global model."""

    @abstractmethod
    def finish(self) -> None:
        """Complete the model after the last segment."""
