"""How gradients are written for the wire: what every codec offers, and the plain one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.accelerator import CopyEvent, CopyStream, is_accelerator, pinned
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.flat.vectors import add, sizes
from aladdin_mpi.transport.base import Event


class ModelEncoder(ABC):
    """The sender's side: it remembers what each receiver has, in as many models as receivers."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], Tensor] = {}
        """By the receiver's rank and the bucket's index."""

    def forget(self) -> None:
        """Send every bucket whole the next time; with :meth:`ModelDecoder.forget`."""
        self._last.clear()

    def lost(self, rank: int, bucket: int) -> None:
        """A receiver has not got the last message: send it the whole bucket the next time."""
        self._last.pop((rank, bucket), None)

    def use(self, rank: int, bits: int) -> None:
        """Send what follows to ``rank`` in ``bits`` a value, if there is a choice."""
        return

    def touch(self, bucket: Bucket, count: int) -> None:
        """Note that a gradient has changed ``count`` values; for timed computing."""
        return

    @abstractmethod
    def encode(
        self, rank: int, bucket: Bucket, values: Tensor, room: Tensor, always: int = 0
    ) -> Tensor:
        """Write ``values``, those of a bucket of the model, for the receiver at ``rank``.

        It must get every message, in order. ``always`` is the number of values that every gradient
        changes, for timed computing.

        Returns:
            The message, a part of ``room``, which is as long as the bucket, in the wire's dtype.
        """

    def besides(self, bucket: Bucket, nbytes: int) -> int:
        """Bytes that move in memory to write a message of ``nbytes``, besides two copies of it."""
        return 0


class ModelDecoder(ABC):
    """The receiver's side: its copy of the last model received, kept where messages are read."""

    def __init__(self) -> None:
        self._last: dict[int, Tensor] = {}

    def forget(self) -> None:
        """Expect every bucket whole the next time."""
        self._last.clear()

    def lost(self, bucket: Bucket) -> None:
        """A message about ``bucket`` is lost."""
        self._last.pop(bucket.index, None)

    def decode(self, bucket: Bucket, message: Tensor) -> Tensor | None:
        """The sender's values of ``bucket``; they stay so until its next message.

        None after a loss, until the bucket comes whole.
        """
        if message.numel() == bucket.numel:
            whole = self._last.setdefault(bucket.index, torch.empty_like(message))
            return whole.copy_(message)
        last = self._last.get(bucket.index)
        if last is not None:
            self._update(last, message)
        return last

    @abstractmethod
    def _update(self, last: Tensor, message: Tensor) -> None:
        """Bring the copy of a bucket up to date."""


class GradientCodec(ABC):
    """How a bucket's gradient is written for the wire and read from it.

    A message is a one-dimensional tensor of ``dtype``. One as long as its bucket is
    the values themselves; a codec that leaves values out writes shorter ones, so
    that a message's length says all about its form.
    """

    dtype: torch.dtype

    @property
    @abstractmethod
    def plain(self) -> DenseWire:
        """For what is not a gradient."""

    def buffer(self, numel: int) -> Tensor:
        """Return a new buffer that holds any message about ``numel`` values: none is longer."""
        return self.plain.buffer(numel)

    def buffer_for(self, vector: Tensor) -> Tensor:
        """Return room for a flat gradient's messages: ``vector`` itself if that can be sent."""
        return self.plain.buffer_for(vector)

    @abstractmethod
    def compress(
        self, bucket: Bucket, values: Tensor, samples: int, room: Tensor
    ) -> tuple[Tensor, Event | None]:
        """Write ``values``, the gradient of ``bucket``, and leave them as they are.

        ``samples`` is the number of the run's sample that the gradient starts at, ``room`` the
        bucket's part of a :meth:`buffer_for`.

        Returns:
            The message, to be left alone until it is sent, as are ``values`` and
            ``room``; and the event to send it after, if any.
        """

    @abstractmethod
    def add(self, bucket: Bucket, message: Tensor, target: Tensor, alpha: float = 1.0) -> None:
        """``target <- target + alpha * gradient``; ``target`` has the bucket's length."""

    def use(self, bits: int) -> None:
        """Send what follows in ``bits`` a value, where there is a choice."""
        return

    def numbers(self, bucket: Bucket, message: Tensor) -> Tensor:
        """The part of ``message`` that is values, and no positions."""
        return message

    def selected(self, bucket: Bucket, length: int) -> int:
        """Number of values that were chosen for a message of ``length``, besides the vectors'."""
        return bucket.numel

    def always_sent(self, bucket: Bucket) -> int:
        """Number of values, those of vectors, that are in every message about ``bucket``."""
        return 0

    def besides(self, bucket: Bucket, nbytes: int) -> int:
        """Bytes that move in memory to add a message of ``nbytes``, besides those of values."""
        return 0

    def model_encoder(self) -> ModelEncoder | None:
        """What servers write models with; None: they are sent as they are, by :attr:`plain`."""
        return None

    def model_decoder(self) -> ModelDecoder | None:
        """What reads those of :meth:`model_encoder`."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What has not been sent yet, for a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state from :meth:`state_dict`."""
        assert not state

    def scale_held_back(self, factor: float) -> None:
        """Scale what has not been sent yet."""
        return


class DenseWire(GradientCodec):
    """Moves flat vectors between their device and the buffers that are sent.

    On the CPU in fp32 the vector itself is sent and nothing is copied. From a GPU,
    values are copied to pinned memory on a side stream, in the wire's dtype.

    Args:
        dtype: of the values on the wire: torch.float32, torch.float64 or torch.bfloat16.
        device: where the vectors live; "meta" with timed computing, when nothing is
            copied.
        moves_bytes: whether the transport needs real memory, as over MPI, or sizes do.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, moves_bytes: bool = True) -> None:
        self.dtype = dtype
        self.device = device
        self._memory = "cpu" if moves_bytes or device.type != "meta" else "meta"
        self._copies = CopyStream(device) if is_accelerator(device) else None

    @property
    def plain(self) -> DenseWire:
        """Itself."""
        return self

    def buffer(self, numel: int) -> Tensor:
        """See :meth:`GradientCodec.buffer`; in memory that the transport can use.

        Cleared: timed computing sends it as it is, and what the memory held before may look like
        a message that was damaged on its way.
        """
        if self._copies is not None:
            return pinned(numel, self.dtype, self.device)
        if self._memory == "meta":
            return sizes(numel, self.dtype)
        return torch.zeros(numel, dtype=self.dtype)

    def buffer_for(self, vector: Tensor) -> Tensor:
        """A buffer as long as ``vector``: ``vector`` itself where it can be sent as it is."""
        if vector.dtype == self.dtype and vector.device.type == self._memory:
            return vector
        return self.buffer(vector.numel())

    def encode(self, values: Tensor, wire: Tensor) -> CopyEvent | None:
        """Put ``values`` into ``wire``; returns the event to send after, if any."""
        if values.is_meta:
            return None
        if self._copies is None:
            if wire.data_ptr() != values.data_ptr() or wire.dtype != values.dtype:
                wire.copy_(values)
            return None
        return self._copies.copy(values, wire)

    def fetch(self, message: Tensor) -> tuple[Tensor, CopyEvent | None]:
        """A received ``message`` where the vectors live; and what to receive into it again after.

        The message itself where it lies there already.
        """
        return (message, None) if self._copies is None else self._copies.fetch(message)

    def stage(self, message: Tensor, room: Tensor | None = None) -> tuple[Tensor, Event | None]:
        """A complete ``message`` in memory that the transport can use; and what to send after.

        That memory is ``message`` itself, or else ``room``, if there is one.
        """
        if self._copies is None:
            return message, None
        staged = torch.empty_like(message, device="cpu", pin_memory=True) if room is None else room
        return staged, self.encode(message, staged)

    def compress(
        self, bucket: Bucket, values: Tensor, samples: int, room: Tensor
    ) -> tuple[Tensor, Event | None]:
        """The values as they are, in ``room``."""
        return room, self.encode(values, room)

    def add(self, bucket: Bucket, message: Tensor, target: Tensor, alpha: float = 1.0) -> None:
        """``target <- target + alpha * message``."""
        add(target, message, alpha)
