"""What goes on the wire when nothing is left out: fp32, or bf16 at half the bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from aladdin_mpi.compression.base import GradientCodec
from aladdin_mpi.layout import Bucket
from aladdin_mpi.transport.base import Event
from aladdin_mpi.vectors import add


class DenseWire(GradientCodec):
    """Moves flat vectors between their device and the buffers that are sent.

    On the CPU in fp32 the vector itself is sent and nothing is copied. From a GPU,
    values are copied to pinned memory on a side stream, in the wire's dtype.

    Args:
        dtype: of the values on the wire: torch.float32 or torch.bfloat16.
        device: where the vectors live; "meta" with timed computing, when nothing is
            copied.
        moves_bytes: whether the transport needs real memory, as over MPI, or sizes do.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, moves_bytes: bool = True) -> None:
        self.dtype = dtype
        self.device = device
        self._memory = "cpu" if moves_bytes or device.type != "meta" else "meta"
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def plain(self) -> DenseWire:
        """Itself."""
        return self

    def buffer(self, numel: int) -> Tensor:
        """A new buffer for ``numel`` values, in memory that the transport can use.

        Cleared: timed computing sends it as it is, and what the memory held before may look like
        a message that was damaged on its way.
        """
        pinned = self._stream is not None
        return torch.zeros(numel, dtype=self.dtype, device=self._memory, pin_memory=pinned)

    def buffer_for(self, vector: Tensor) -> Tensor:
        """A buffer as long as ``vector``: ``vector`` itself where it can be sent as it is."""
        if vector.dtype == self.dtype and vector.device.type == self._memory:
            return vector
        return self.buffer(vector.numel())

    def encode(self, values: Tensor, wire: Tensor) -> Event | None:
        """Put ``values`` into ``wire``; returns the event to send after, if any."""
        if values.is_meta:
            return None
        if self._stream is None:
            if wire.data_ptr() != values.data_ptr() or wire.dtype != values.dtype:
                wire.copy_(values)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            wire.copy_(values, non_blocking=True)
            return self._stream.record_event()

    def stage(self, message: Tensor, room: Tensor | None = None) -> tuple[Tensor, Event | None]:
        """A complete ``message`` in memory that the transport can use; and what to send after.

        That memory is ``message`` itself, or else ``room``, if there is one.
        """
        if self._stream is None:
            return message, None
        staged = torch.empty_like(message, device="cpu", pin_memory=True) if room is None else room
        event = self.encode(message, staged)
        message.record_stream(self._stream)  # its memory must outlive the copy
        return staged, event

    def compress(
        self, bucket: Bucket, values: Tensor, samples: int, room: Tensor
    ) -> tuple[Tensor, Event | None]:
        """The values as they are, in ``room``."""
        return room, self.encode(values, room)

    def add(self, bucket: Bucket, message: Tensor, target: Tensor, alpha: float = 1.0) -> None:
        """``target <- target + alpha * message``."""
        add(target, message, alpha)
