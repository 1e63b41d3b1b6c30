"""The batches of a run: put on the model's device, and handed out one by one or by epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from aladdin_mpi.accelerator import CopyStream, is_accelerator


class Delivery:
    """Puts batches of any structure on a device: by pinned memory, on a stream of its own.

    Args:
        device: of the model.
        channels_last: images are laid out so.
    """

    def __init__(self, device: torch.device, channels_last: bool) -> None:
        self._device = device
        self._channels_last = channels_last
        self._copies = CopyStream(device) if is_accelerator(device) else None

    def __call__(self, batch: Any) -> Any:
        """The same batch there."""
        return tree_map(self._put, batch)

    def _put(self, item: Any) -> Any:
        if not isinstance(item, Tensor):
            # Such as the batches of a tokenizer, which are no containers that torch knows.
            return item.to(self._device) if callable(getattr(item, "to", None)) else item
        if self._channels_last and item.dim() == 4:
            item = item.contiguous(memory_format=torch.channels_last)
        if self._copies is None or item.device.type != "cpu" or item.is_sparse:
            return item.to(self._device, non_blocking=True)
        return self._copies.fetch(item if item.is_pinned() else item.pin_memory())[0]


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
