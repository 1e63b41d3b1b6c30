"""Encoding of gradients and models for the wire: the codec interface, and the plain codec."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.accelerator import CopyEvent, CopyStream, is_accelerator, pinned
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.flat.vectors import add, sizes
from aladdin_mpi.transport.base import Event


class ModelEncoder(ABC):
    """The sender's side: stores the last model sent to each receiver."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], Tensor] = {}
        """Models by the receiver's rank and the bucket's index."""

    def forget(self) -> None:
        """Send every bucket in full next time; pairs with :meth:`ModelDecoder.forget`."""
        self._last.clear()

    def lost(self, rank: int, bucket: int) -> None:
        """Send a bucket in full next time, as the receiver did not get the last message."""
        self._last.pop((rank, bucket), None)

    def use(self, rank: int, level: float) -> None:
        """Send further messages to ``rank`` at a level, if there is a choice: bits, or a share."""
        return

    def adopt(self, rank: int, bucket: Bucket, values: Tensor) -> None:
        """Record that the receiver has ``values``, so that it need not get them in full."""
        raise NotImplementedError

    def touch(self, bucket: Bucket, count: int) -> None:
        """Record that a gradient has changed ``count`` values; for simulated computation."""
        return

    @abstractmethod
    def encode(
        self, rank: int, bucket: Bucket, values: Tensor, out: Tensor, always: int = 0
    ) -> Tensor:
        """Encode ``values``, a bucket of the model, for the receiver at ``rank``.

        The receiver must get every message, in order. ``always`` is the number of values that every
        gradient changes, for simulated computation.

        Returns:
            The message, a part of ``out``, which is as long as the bucket, in the wire's dtype.
        """

    def extra_bytes(self, bucket: Bucket, nbytes: int) -> int:
        """Return the bytes moved in memory to write a message, besides two copies of it."""
        return 0


class ModelDecoder(ABC):
    """The receiver's side: stores the last model received, on the device that reads messages."""

    def __init__(self) -> None:
        self._last: dict[int, Tensor] = {}
        self._memory: Tensor | None = None

    def keep_in(self, vector: Tensor) -> None:
        """Store the models in the flat ``vector``, of the messages' dtype, not in new memory."""
        self._memory = vector

    def forget(self) -> None:
        """Expect every bucket in full next time."""
        self._last.clear()

    def lost(self, bucket: Bucket) -> None:
        """Discard the copy of ``bucket``, as a message about it is lost."""
        self._last.pop(bucket.index, None)

    def decode(self, bucket: Bucket, message: Tensor) -> Tensor | None:
        """Return the sender's values of ``bucket``, valid until its next message.

        After a loss, return None until the bucket arrives in full.
        """
        if message.numel() == bucket.numel:
            memory = torch.empty_like(message) if self._memory is None else bucket.of(self._memory)
            return self._last.setdefault(bucket.index, memory).copy_(message)
        last = self._last.get(bucket.index)
        if last is not None:
            self._update(last, message)
        return last

    @abstractmethod
    def _update(self, last: Tensor, message: Tensor) -> None:
        """Update the copy of a bucket in place."""


class GradientCodec(ABC):
    """Encoder of gradients for the wire, and decoder of their messages.

    A message is a one-dimensional tensor of ``dtype``. A message as long as its bucket
    holds the plain values; a codec that omits values writes shorter ones, so that the
    length of a message determines its format.
    """

    dtype: torch.dtype
    holds = False
    """Whether :meth:`hold` can hold back values, and gradients are free once they are encoded."""

    @property
    @abstractmethod
    def plain(self) -> DenseWire:
        """The codec for everything other than gradients."""

    def buffer(self, numel: int) -> Tensor:
        """Return a new buffer that can hold any message about ``numel`` values."""
        return self.plain.buffer(numel)

    def buffer_for(self, vector: Tensor) -> Tensor:
        """Return a buffer for a flat gradient's messages: ``vector`` itself if it can be sent."""
        return self.plain.buffer_for(vector)

    def wires(self, vector: Tensor, buckets: Sequence[Bucket]) -> list[Tensor]:
        """Return memory for a message about each of the ``buckets`` of a flat gradient."""
        buffer = self.buffer_for(vector)
        return [bucket.of(buffer) for bucket in buckets]

    @abstractmethod
    def compress(
        self, bucket: Bucket, values: Tensor, samples: int, out: Tensor
    ) -> tuple[Tensor, Event | None]:
        """Encode ``values``, the gradient of ``bucket``, without changing them.

        ``samples`` is the sample number at which the gradient starts, ``out`` the bucket's part
        of a :meth:`buffer_for`, or its memory from :meth:`wires`.

        Returns:
            The message, and the event after which to send it, if any. The message and ``out`` must
            not change before it is sent, nor must ``values`` unless the codec :attr:`holds`.
        """

    def hold(self, bucket: Bucket, values: Tensor) -> None:
        """Hold back ``values``, which the next message will include."""
        raise NotImplementedError

    def add_held(self, bucket: Bucket, target: Tensor, alpha: float) -> None:
        """Compute ``target <- target + alpha * values``, with the values held back."""
        raise NotImplementedError

    def state_without_held(self) -> dict[str, Any]:
        """Return a state for :meth:`load_state_dict` without anything held back."""
        raise NotImplementedError

    @abstractmethod
    def add(self, bucket: Bucket, message: Tensor, target: Tensor, alpha: float = 1.0) -> None:
        """Compute ``target <- target + alpha * gradient``; ``target`` has the bucket's length."""

    def add_to(
        self, bucket: Bucket, message: Tensor, targets: Sequence[tuple[Tensor, float]]
    ) -> None:
        """Compute ``target <- target + alpha * gradient`` for pairs of a target and alpha."""
        for target, alpha in targets:
            self.add(bucket, message, target, alpha)

    def use(self, bits: int) -> None:
        """Encode further messages with ``bits`` bits per value, if there is a choice."""
        return

    def numbers(self, bucket: Bucket, message: Tensor) -> Tensor:
        """Return the part of ``message`` that contains values, without positions."""
        return message

    def selected(self, bucket: Bucket, length: int) -> int:
        """Return the number of selected values in a message of ``length``, excluding vectors."""
        return bucket.numel

    def always_sent(self, bucket: Bucket) -> int:
        """Return the number of values, those of vectors, in every message about ``bucket``."""
        return 0

    def extra_bytes(self, bucket: Bucket, nbytes: int) -> int:
        """Return the bytes moved in memory to add a message, besides those of its values."""
        return 0

    def model_encoder(self) -> ModelEncoder | None:
        """Return the servers' encoder of models; None: models are sent by :attr:`plain`."""
        return None

    def model_decoder(self) -> ModelDecoder | None:
        """Return the decoder for :meth:`model_encoder`'s messages."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the residual, the values not sent yet, for a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`."""
        assert not state

    def scale_held_back(self, factor: float) -> None:
        """Scale the residual."""
        return


class DenseWire(GradientCodec):
    """Transfer of flat vectors between their device and send or receive buffers.

    On the CPU in fp32 the vector itself is sent and nothing is copied. From a GPU,
    values are copied to pinned memory on a side stream, in the wire's dtype.

    Args:
        dtype: dtype on the wire: torch.float32, torch.float64 or torch.bfloat16.
        device: device of the vectors; "meta" with simulated computation, when nothing is
            copied.
        moves_bytes: whether the transport needs real memory, as MPI does, or only sizes.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, moves_bytes: bool = True) -> None:
        self.dtype = dtype
        self.device = device
        self._memory = "cpu" if moves_bytes or device.type != "meta" else "meta"
        self._copies = CopyStream(device) if is_accelerator(device) else None

    @property
    def plain(self) -> DenseWire:
        """This codec itself."""
        return self

    def buffer(self, numel: int) -> Tensor:
        """Return a new buffer in memory that the transport can use.

        It is zeroed: simulated computation sends it unfilled, and old memory contents could look
        like a message that was damaged in transit.
        """
        if self._copies is not None:
            return pinned(numel, self.dtype, self.device)
        if self._memory == "meta":
            return sizes(numel, self.dtype)
        return torch.zeros(numel, dtype=self.dtype)

    def buffer_for(self, vector: Tensor) -> Tensor:
        """Return a buffer as long as ``vector``: ``vector`` itself if it can be sent."""
        if vector.dtype == self.dtype and vector.device.type == self._memory:
            return vector
        return self.buffer(vector.numel())

    def encode(self, values: Tensor, wire: Tensor) -> CopyEvent | None:
        """Copy ``values`` to ``wire``; return the event to send after, if any."""
        if values.is_meta:
            return None
        if self._copies is None:
            if wire.data_ptr() != values.data_ptr() or wire.dtype != values.dtype:
                wire.copy_(values)
            return None
        return self._copies.copy(values, wire)

    def fetch(self, message: Tensor, after: Event | None = None) -> tuple[Tensor, CopyEvent | None]:
        """Return ``message`` on the vectors' device, and the event that frees its buffer.

        Returns the message itself if it is on that device. ``after`` is the event after which it is
        complete, if it was encoded here.
        """
        if self._copies is None:
            return message, None
        return self._copies.fetch(message, after if isinstance(after, CopyEvent) else None)

    def stage(self, message: Tensor, out: Tensor | None = None) -> tuple[Tensor, Event | None]:
        """Return ``message`` in memory that the transport can use, and the event to await.

        That memory is ``message`` itself if possible, otherwise ``out`` or, without it, new memory.
        """
        if self._copies is None:
            return message, None
        staged = torch.empty_like(message, device="cpu", pin_memory=True) if out is None else out
        return staged, self.encode(message, staged)

    def compress(
        self, bucket: Bucket, values: Tensor, samples: int, out: Tensor
    ) -> tuple[Tensor, Event | None]:
        """Copy the values to ``out``."""
        return out, self.encode(values, out)

    def add(self, bucket: Bucket, message: Tensor, target: Tensor, alpha: float = 1.0) -> None:
        """Compute ``target <- target + alpha * message``."""
        add(target, message, alpha)
