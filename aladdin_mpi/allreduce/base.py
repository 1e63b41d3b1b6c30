"""The interface of all-reduces, and waiting for libraries outside MPI."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from aladdin_mpi.codec.base import DenseWire
from aladdin_mpi.errors import WaitTimeoutError
from aladdin_mpi.transport.base import Event, Transport


class Buffers:
    """Buffers that a library can sum, filled from values and copied back to them.

    Args:
        dtype: dtype on the wire.
        device: device of the values; "meta" with simulated computation.
        moves_bytes: whether the transport needs real memory, as MPI does, or only sizes.
        on_device: the library sums on the device of the values, as NCCL does.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device, moves_bytes: bool, on_device: bool = False
    ) -> None:
        self.dtype = dtype
        self._wire = DenseWire(dtype, device, moves_bytes)
        self._on_device = on_device
        self._made: dict[int, Tensor] = {}
        self._totals: dict[int, Tensor] = {}

    @property
    def name(self) -> str:
        """The name of the dtype, for messages."""
        return str(self.dtype).removeprefix("torch.")

    def load(self, values: Tensor, key: int) -> tuple[Tensor, Event | None]:
        """Return the buffer filled with ``values``, and the event of its completion, if any."""
        buffer = self._made.get(key)
        if buffer is None or buffer.numel() != values.numel():
            on_device = self._on_device
            buffer = values.to(self.dtype) if on_device else self._wire.buffer_for(values)
            if buffer is not values:
                self._made[key] = buffer.zero_()  # simulated computation never fills it
        if self._on_device:
            if buffer is not values:
                buffer.copy_(values)
            return buffer, None
        return buffer, self._wire.encode(values, buffer)

    def total(self, buffer: Tensor, key: int) -> Tensor:
        """Return memory for the sum of a buffer, for a library that does not sum in place."""
        total = self._totals.get(key)
        if total is None or total.numel() != buffer.numel():
            total = self._totals[key] = self.like(buffer)
        return total

    def like(self, buffer: Tensor) -> Tensor:
        """Return zeroed memory of the same length and kind as ``buffer``."""
        return self._wire.buffer(buffer.numel())

    @staticmethod
    def store(buffer: Tensor, values: Tensor) -> None:
        """Copy a sum from a buffer of :meth:`load` into ``values``."""
        if buffer is not values and not values.is_meta:
            values.copy_(buffer, non_blocking=True)


LONGEST_NAP = 0.0002
"""Longest sleep between two polls of another library's operation, in seconds."""


@dataclass(frozen=True)
class PendingSum:
    """A sum in progress."""

    wait: Callable[[], Tensor]
    """Wait for the sum and return it; call once.

    The result is ``values`` or memory that stays unchanged until the next sum with this key starts;
    then the contents of ``values`` are undefined. The time is added to ``traffic.waiting``. On a
    GPU the sum is valid on the current stream.

    Raises:
        WaitTimeoutError: the sum took longer than the transport's ``timeout``.
    """


class AllReduce(ABC):
    """Interface of sums of slices of the flat gradient over all ranks.

    Every rank starts the same slices in the same order, waits for all of them, and calls
    no collective of the transport in between.

    Attributes:
        name: ``ring``, ``mpi``, ``horovod``, ``torch`` or ``gather``.
    """

    name: str

    @abstractmethod
    def start(self, values: Tensor, key: int) -> PendingSum:
        """Start summing ``values`` over all ranks.

        Args:
            values: contiguous slice of a flat vector, not to be modified before the sum
                is complete, which may be written into it.
            key: index of the bucket; only one sum in progress may have it.
        """

    @abstractmethod
    def describe(self) -> str:
        """Return a short description of the method, for the log."""

    def abandon(self, failed_rank: int) -> None:
        """End waits for sums with :class:`PeerFailedError`, as ``failed_rank`` has failed.

        Also called by handlers. Does nothing by default, as collectives end by themselves.
        """
        return

    def close(self) -> None:
        """Close on every rank, when no sum is in progress. Does nothing by default."""
        return


def timeout_of(transport: Transport) -> float | None:
    """Return the longest wait in seconds that the transport allows; None: no limit."""
    timeout: float | None = getattr(transport, "timeout", None)
    return timeout


def wait_until(done: Callable[[], bool], transport: Transport, what: str) -> None:
    """Sleep until ``done()``; the time is added to the transport's ``traffic.waiting``.

    Raises:
        WaitTimeoutError: the wait for ``what`` took longer than the transport's ``timeout``.
    """
    limit = timeout_of(transport)
    start = time.perf_counter()
    nap = 0.0
    try:
        while not done():
            if limit is not None and time.perf_counter() - start > limit:
                raise WaitTimeoutError(
                    f"rank {transport.rank} waited {limit:g} s for {what}: a rank hangs, has "
                    "failed, or is slower than --timeout allows"
                )
            time.sleep(nap)
            nap = min(LONGEST_NAP, nap + LONGEST_NAP / 10)
    finally:
        transport.traffic.waiting += time.perf_counter() - start
