"""What every way of writing gradients for the wire offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aladdin_mpi.compression.models import ModelDecoder, ModelEncoder
from aladdin_mpi.layout import Bucket
from aladdin_mpi.transport.base import Event

if TYPE_CHECKING:
    from aladdin_mpi.compression.dense import DenseWire


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

    @abstractmethod
    def buffer(self, numel: int) -> Tensor:
        """A new buffer that holds any message about ``numel`` values."""

    @abstractmethod
    def buffer_for(self, vector: Tensor) -> Tensor:
        """Room for the messages of a flat gradient: ``vector`` itself where that can be sent."""

    @abstractmethod
    def compress(
        self, bucket: Bucket, values: Tensor, samples: int, room: Tensor
    ) -> tuple[Tensor, Event | None]:
        """Write ``values``, the gradient of ``bucket``, and leave them as they are.

        Args:
            bucket: whose gradient it is.
            values: as many as the bucket has.
            samples: number of the run's sample that the gradient starts at.
            room: the bucket's part of a :meth:`buffer_for`.

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
