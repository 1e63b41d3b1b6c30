"""A run's batches by epoch, and loops that are left before they end by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_END = object()
NO_BATCH = object()
"""In place of a batch where a worker has none, but may come to the end of an epoch."""


class Batches(Iterator[Any]):
    """The batches of a run, for one loop.

    When nobody holds it any more before it has come to its end, the loop has been left: by
    ``break``, or by an error. Which of the two cannot be told at that moment.

    Args:
        batches: of the run.
        left: called then.
        check: called before each batch.
    """

    def __init__(
        self, batches: Iterator[Any], left: Callable[[], None], check: Callable[[], None]
    ) -> None:
        self._batches = batches
        self._left = left
        self._check = check

    def __next__(self) -> Any:
        """The next batch."""
        self._check()
        return next(self._batches)

    def __del__(self) -> None:
        """Nobody holds it any more."""
        self._left()


class Epoch(Iterator[Any]):
    """The batches that a worker computes while the workers together go through the data once.

    A worker that is slow has fewer of them, or none. ``break`` ends the epoch for all.

    Args:
        number: from 0.
        batches: of the run.
        is_past: whether the next batch belongs to a later epoch, or there is none.
    """

    def __init__(self, number: int, batches: Iterator[Any], is_past: Callable[[], bool]) -> None:
        self.number = number
        self.is_done = False
        self._batches = batches
        self._is_past = is_past

    def __int__(self) -> int:
        """Its number, from 0."""
        return self.number

    __index__ = __int__

    def __str__(self) -> str:
        """Its number, from 0."""
        return str(self.number)

    def __format__(self, spec: str) -> str:
        """Its number, as ``spec`` says."""
        return format(self.number, spec)

    def __next__(self) -> Any:
        """The next batch."""
        while not self._is_past():
            batch = next(self._batches, _END)
            if batch is _END:
                break
            if batch is not NO_BATCH:
                return batch
        self.is_done = True
        raise StopIteration


class HeldBack(Iterator[Any]):
    """Batches of which the first has been asked for already, to see whether there is any."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        first = next(batches, _END)
        self._first = [] if first is _END or first is NO_BATCH else [first]

    @property
    def has_first(self) -> bool:
        """Whether it has not been taken yet."""
        return bool(self._first)

    def __next__(self) -> Any:
        """The next batch."""
        return self._first.pop() if self._first else next(self._batches)
