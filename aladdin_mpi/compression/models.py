"""What every way of sending models as differences from what the receiver has offers."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from aladdin_mpi.model.layout import Bucket


class ModelEncoder(ABC):
    """The sender's side: it remembers what each receiver has."""

    @abstractmethod
    def forget(self) -> None:
        """Send every bucket whole the next time; with :meth:`ModelDecoder.forget`."""

    @abstractmethod
    def lost(self, rank: int, bucket: int) -> None:
        """A receiver has not got the last message: send it the whole bucket the next time."""

    def use(self, rank: int, bits: int) -> None:
        """Send what follows to ``rank`` in ``bits`` a value, where there is a choice."""
        return

    def touch(self, bucket: Bucket, count: int) -> None:
        """Note that a gradient has changed ``count`` values; for timed computing."""
        return

    @abstractmethod
    def encode(
        self, rank: int, bucket: Bucket, values: Tensor, room: Tensor, always: int = 0
    ) -> Tensor:
        """Write ``values`` for the receiver at ``rank``; it must get every message, in order.

        Args:
            rank: the receiver's.
            bucket: of the model.
            values: its present values.
            room: at least as long as the bucket, in the wire's dtype.
            always: values that every gradient changes; for timed computing.

        Returns:
            The message, a part of ``room``.
        """

    def besides(self, bucket: Bucket, nbytes: int) -> int:
        """Bytes that move in memory to write a message of ``nbytes``, besides two copies of it."""
        return 0


class ModelDecoder(ABC):
    """The receiver's side: its copy of the last model received."""

    @abstractmethod
    def forget(self) -> None:
        """Expect every bucket whole the next time."""

    @abstractmethod
    def lost(self, bucket: Bucket) -> None:
        """A message about ``bucket`` is lost."""

    @abstractmethod
    def decode(self, bucket: Bucket, message: Tensor) -> Tensor | None:
        """The sender's values of ``bucket``; they stay so until its next message.

        None after a loss, until the bucket comes whole.
        """
