"""The memory that is summed: the gradient's own where it will do, else a copy for each bucket."""

from __future__ import annotations

import torch
from torch import Tensor

from aladdin_mpi.compression.codec import DenseWire
from aladdin_mpi.transport.request import Event


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
            buffer = self._make(values)
            if buffer is not values:
                self._made[key] = buffer.zero_()  # timed computing fills it with nothing else
        if self._on_device:
            if buffer is not values:
                buffer.copy_(values)
            return buffer, None
        return buffer, self._wire.encode(values, buffer)

    def _make(self, values: Tensor) -> Tensor:
        if not self._on_device:
            return self._wire.buffer_for(values)
        return values if values.dtype == self.dtype else torch.empty_like(values, dtype=self.dtype)

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
