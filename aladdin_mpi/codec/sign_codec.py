"""Codec of sparse signs: see :mod:`aladdin_mpi.codec.signs` for the messages."""

from __future__ import annotations

from torch import Tensor

from aladdin_mpi.codec import signs
from aladdin_mpi.codec.base import ModelDecoder
from aladdin_mpi.codec.scaled import ScaledCodec, ShadowEncoder, on_device_of
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.flat.vectors import cut
from aladdin_mpi.transport.base import Event

FIRST_SHARE = 0.1
"""Share of the values in a model's message to a receiver without a call of ``use``."""


class SignCodec(ScaledCodec):
    """Codec whose messages hold the signs of the largest values, and a few scales.

    :meth:`take` moves a share of a residual into a message, :meth:`compress` sends all values as
    they are. Models are sent as sparse differences from what the receiver has.
    """

    def take(self, left: Tensor, share: float) -> Tensor:
        """Move the largest ``share`` of the values of ``left`` into a new message.

        The difference between the values and their encoding stays in ``left``.
        """
        if left.is_meta:
            return self._wire.buffer(signs.expected_length(left.numel(), share))
        out = left.new_empty(signs.longest_message(left.numel()))
        return signs.encode(left, share, out, self.scratch).clone()

    def compress(
        self, bucket: Bucket, values: Tensor, samples: int, out: Tensor
    ) -> tuple[Tensor, Event | None]:
        """Copy the values to ``out``."""
        return self._wire.compress(bucket, values, samples, out)

    def _scales(self, message: Tensor, numel: int) -> Tensor:
        return signs.scales_of(message, numel)

    def _add_encoded(self, message: Tensor, target: Tensor, alpha: float) -> None:
        signs.add(message, target, alpha)

    def model_encoder(self) -> SignEncoder:
        """Return an encoder of sparse differences."""
        return SignEncoder()

    def model_decoder(self) -> SignDecoder:
        """Return the decoder for sparse differences."""
        return SignDecoder()


class SignEncoder(ShadowEncoder):
    """Encoder of the largest differences.

    Omitted values stay in the difference. The receivers' copies persist between segments:
    :meth:`forget` does nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shares: dict[int, float] = {}

    def forget(self) -> None:
        """Keep the shadows, which :meth:`adopt` sets."""

    def use(self, rank: int, level: float) -> None:
        """Encode the largest ``level``, a share, of the differences for ``rank``."""
        self._shares[rank] = level

    def encode(
        self, rank: int, bucket: Bucket, values: Tensor, out: Tensor, always: int = 0
    ) -> Tensor:
        """Encode the difference from the shadow; without one, the whole bucket."""
        shadow = self._last.get((rank, bucket.index))
        share = self._shares.get(rank, FIRST_SHARE)
        if shadow is None or bucket.numel < signs.SMALLEST:
            return self._whole(rank, bucket, values, out)
        if values.is_meta:
            return cut(out, 0, signs.expected_length(bucket.numel, share))
        memory = on_device_of(cut(out, 0, bucket.numel), values)
        written = signs.encode_difference(values, shadow, share, memory, self._scratch)
        message = cut(out, 0, written.numel())
        if memory.device != out.device:
            message.copy_(written)
        return message


class SignDecoder(ModelDecoder):
    """Decoder that returns messages as they are: the receiver adds them to its model."""

    def __init__(self) -> None:
        super().__init__()
        self._missing: set[int] = set()

    def forget(self) -> None:
        """Keep expecting the buckets that were lost."""

    def lost(self, bucket: Bucket) -> None:
        """Ignore further differences until the bucket arrives in full."""
        self._missing.add(bucket.index)

    def decode(self, bucket: Bucket, message: Tensor) -> Tensor | None:
        """Return the message; after a loss None, until the bucket arrives in full."""
        if message.numel() == bucket.numel:
            self._missing.discard(bucket.index)
        return None if bucket.index in self._missing else message

    def _update(self, last: Tensor, message: Tensor) -> None:
        raise NotImplementedError
