"""The batches of a run, on the model's device, one by one or by epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from aladdin_mpi.accelerator import CopyStream, is_accelerator


class Delivery:
    """Puts batches of any structure on a device: by pinned memory, on a stream of its own."""

    def __init__(self, device: torch.device, channels_last: bool) -> None:
        self._device = device
        self._channels_last = channels_last
        self._copies = CopyStream(device) if is_accelerator(device) else None

    def __call__(self, batch: Any) -> Any:
        """Return the batch on the device."""
        return tree_map(self._put, batch)

    def _put(self, item: Any) -> Any:
        if not isinstance(item, Tensor):
            # Such as the batches of a tokenizer, which torch does not know as containers.
            return item.to(self._device) if callable(getattr(item, "to", None)) else item
        if self._channels_last and item.dim() == 4:
            item = item.contiguous(memory_format=torch.channels_last)
        if self._copies is None or item.device.type != "cpu" or item.is_sparse:
            return item.to(self._device, non_blocking=True)
        return self._copies.fetch(item if item.is_pinned() else item.pin_memory())[0]


_END = object()
NO_BATCH = object()
"""Stands for a batch where a worker has none, but may have reached the end of an epoch."""


class Batches(Iterator[Any]):
    """The batches of a run, for one loop.

    If it is garbage-collected before its end, the loop was left by ``break`` or by an error. Which
    of the two cannot be known at that moment.

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
        self.fetched: list[Any] = []

    def __next__(self) -> Any:
        self._check()
        return self.fetched.pop() if self.fetched else next(self._batches)

    def fetch(self) -> None:
        """Fetch the first batch, if there is one, without returning it."""
        self._check()
        self.fetched = [each for each in islice(self._batches, 1) if each is not NO_BATCH]

    def __del__(self) -> None:
        self._left()


class Epoch(Iterator[Any]):
    """A worker's batches while the workers together pass once through the data.

    A slow worker has fewer of them, or none. ``break`` ends the epoch for all. ``is_past`` returns
    whether the next batch belongs to a later epoch, or there is none.
    """

    def __init__(self, number: int, batches: Iterator[Any], is_past: Callable[[], bool]) -> None:
        self.number = number
        self.is_done = False
        self._batches = batches
        self._is_past = is_past

    def __int__(self) -> int:
        return self.number

    __index__ = __int__

    def __format__(self, spec: str) -> str:
        return format(self.number, spec)

    def __str__(self) -> str:
        return str(self.number)

    def __next__(self) -> Any:
        while not self._is_past():
            batch = next(self._batches, _END)
            if batch is _END:
                break
            if batch is not NO_BATCH:
                return batch
        self.is_done = True
        raise StopIteration
