"""What every way to sum gradients offers, and how those wait that MPI does not wait for."""

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
    """Puts values into what a library can sum, and sums back into the values.

    Args:
        dtype: of the values on the wire.
        device: where the values live; "meta" with timed computing.
        moves_bytes: whether real memory is needed, as over MPI, or sizes do.
        on_device: the library sums where the values live, as NCCL does.
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
        """The dtype, as it is printed."""
        return str(self.dtype).removeprefix("torch.")

    def load(self, values: Tensor, key: int) -> tuple[Tensor, Event | None]:
        """The buffer with ``values`` in it, and the event after which they are there, if any."""
        buffer = self._made.get(key)
        if buffer is None or buffer.numel() != values.numel():
            on_device = self._on_device
            buffer = values.to(self.dtype) if on_device else self._wire.buffer_for(values)
            if buffer is not values:
                self._made[key] = buffer.zero_()  # timed computing fills it with nothing else
        if self._on_device:
            if buffer is not values:
                buffer.copy_(values)
            return buffer, None
        return buffer, self._wire.encode(values, buffer)

    def total(self, buffer: Tensor, key: int) -> Tensor:
        """Memory for the sum of :meth:`load`'s buffer, for a library that does not add in place."""
        total = self._totals.get(key)
        if total is None or total.numel() != buffer.numel():
            total = self._totals[key] = self.like(buffer)
        return total

    def like(self, buffer: Tensor) -> Tensor:
        """Cleared memory of the same length and kind as one of :meth:`load`'s buffers."""
        return self._wire.buffer(buffer.numel())

    @staticmethod
    def store(buffer: Tensor, values: Tensor) -> None:
        """Put a sum from :meth:`load`'s buffer into ``values``."""
        if buffer is not values and not values.is_meta:
            values.copy_(buffer, non_blocking=True)


LONGEST_NAP = 0.0002
"""Seconds of sleep, at most, between two looks at an operation of another library."""


@dataclass(frozen=True)
class PendingSum:
    """A sum that is under way."""

    wait: Callable[[], Tensor]
    """Wait for the sum and return it; to be called once.

    It is in ``values``, or in memory that stays as it is until the next sum with this key begins;
    the contents of ``values`` are undefined then. The time goes to ``traffic.waiting``. On a GPU
    the sum is there for the current stream.

    Raises:
        WaitTimeoutError: it took longer than the transport's ``timeout``.
    """


class AllReduce(ABC):
    """Sums slices of the flat gradient over all ranks.

    Every rank starts the same slices in the same order, waits for all of them, and calls
    no collective of the transport in between.

    Attributes:
        name: ``ring``, ``mpi``, ``horovod``, ``torch`` or ``gather``.
    """

    name: str

    @abstractmethod
    def start(self, values: Tensor, key: int) -> PendingSum:
        """Begin to sum ``values`` over all ranks.

        Args:
            values: a contiguous fp32 slice of a flat vector, left alone until the
                sum is there, which may be put into it.
            key: the number of the bucket, not that of another sum under way.
        """

    @abstractmethod
    def describe(self) -> str:
        """What does the work, in a few words."""

    def abandon(self, dead: int) -> None:
        """End the waits for sums with :class:`PeerFailedError`: the rank ``dead`` has failed.

        Also called by handlers. Collectives end by themselves.
        """
        return

    def close(self) -> None:
        """End it, on every rank, when nothing is under way."""
        return


def timeout_of(transport: Transport) -> float | None:
    """Return the longest wait in seconds that the transport allows; None: no limit."""
    timeout: float | None = getattr(transport, "timeout", None)
    return timeout


def wait_until(done: Callable[[], bool], transport: Transport, what: str) -> None:
    """Sleep until ``done()``; the time goes to the transport's ``traffic.waiting``.

    Raises:
        WaitTimeoutError: it took longer than the transport's ``timeout``; it names ``what``.
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
