"""Codec of sparse signs: see :mod:`aladdin_mpi.codec.signs` for the messages."""

from __future__ import annotations

from torch import Tensor

from aladdin_mpi.codec import signs
from aladdin_mpi.codec.base import DenseWire, GradientCodec, ModelDecoder, ModelEncoder
from aladdin_mpi.codec.quantise import Scratch
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.flat.vectors import cut
from aladdin_mpi.transport.base import Event

FIRST_SHARE = 0.1
"""Share of the values in a model's message to a receiver without a call of ``use``."""


class SignCodec(GradientCodec):
    """Codec whose messages hold the signs of the largest values, and a few scales.

    :meth:`take` moves a share of a residual into a message, :meth:`compress` sends all values as
    they are. Models are sent as sparse differences from what the receiver has.

    Args:
        wire: stages messages; in fp32.
    """

    def __init__(self, wire: DenseWire) -> None:
        self.dtype = wire.dtype
        self._wire = wire
        self._scratch = Scratch()

    @property
    def plain(self) -> DenseWire:
        """The plain codec, in fp32."""
        return self._wire

    def take(self, left: Tensor, share: float) -> Tensor:
        """Move the largest ``share`` of the values of ``left`` into a new message.

        The difference between the values and their encoding stays in ``left``.
        """
        if left.is_meta:
            return self._wire.buffer(signs.expected_length(left.numel(), share))
        out = left.new_empty(signs.longest_message(left.numel()))
        return signs.encode(left, share, out, self._scratch).clone()

    def compress(
        self, bucket: Bucket, values: Tensor, samples: int, out: Tensor
    ) -> tuple[Tensor, Event | None]:
        """Copy the values to ``out``."""
        return self._wire.compress(bucket, values, samples, out)

    def add(self, bucket: Bucket, message: Tensor, target: Tensor, alpha: float = 1.0) -> None:
        """Compute ``target <- target + alpha * values``, at the encoded positions."""
        if target.is_meta:
            return
        if message.numel() == bucket.numel:
            self._wire.add(bucket, message, target, alpha)
        else:
            signs.add(message, target, alpha)

    def numbers(self, bucket: Bucket, message: Tensor) -> Tensor:
        """Return the scales: if these are finite, all values are."""
        if message.numel() == bucket.numel:
            return message
        return signs.scales_of(message, bucket.numel)

    def extra_bytes(self, bucket: Bucket, nbytes: int) -> int:
        """Return the bytes moved to read and write the target where values were encoded."""
        return 2 * bucket.numel * self.dtype.itemsize - 2 * nbytes

    def model_encoder(self) -> SignEncoder:
        """Return an encoder of sparse differences."""
        return SignEncoder(self._scratch)

    def model_decoder(self) -> SignDecoder:
        """Return the decoder for sparse differences."""
        return SignDecoder()


class SignEncoder(ModelEncoder):
    """Encoder of the largest differences of a model from a shadow of each receiver's copy.

    Omitted values stay in the difference. The receivers' copies persist between segments:
    :meth:`forget` does nothing.
    """

    def __init__(self, scratch: Scratch) -> None:
        super().__init__()
        self._shares: dict[int, float] = {}
        self._scratch = scratch

    def forget(self) -> None:
        """Keep the shadows, which :meth:`adopt` sets."""

    def adopt(self, rank: int, bucket: Bucket, values: Tensor) -> None:
        """Record that the receiver has ``values``."""
        self._last[rank, bucket.index] = values if values.is_meta else values.clone()

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
            self.adopt(rank, bucket, values)
            message = cut(out, 0, bucket.numel)
            if not values.is_meta:
                message.copy_(values)
            return message
        if values.is_meta:
            return cut(out, 0, signs.expected_length(bucket.numel, share))
        if out.device == values.device:
            return signs.encode_difference(values, shadow, share, out, self._scratch)
        written = values.new_empty(signs.longest_message(values.numel()))
        written = signs.encode_difference(values, shadow, share, written, self._scratch)
        return out[: written.numel()].copy_(written)

    def extra_bytes(self, bucket: Bucket, nbytes: int) -> int:
        """Return the bytes moved to read the values, and to read and write the shadow."""
        whole = bucket.numel * 4
        return 3 * whole - nbytes if nbytes < whole else whole


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
