"""The common part of codecs whose messages hold encoded values with their scales.

A message as long as its bucket holds plain values; an encoded one is shorter.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from aladdin_mpi.codec.base import DenseWire, GradientCodec, ModelEncoder
from aladdin_mpi.codec.quantise import Scratch
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.flat.vectors import cut


class ScaledCodec(GradientCodec):
    """A codec of encoded or plain values; ``wire`` stages messages and is in fp32."""

    def __init__(self, wire: DenseWire) -> None:
        assert wire.dtype == torch.float32
        self.dtype = wire.dtype
        self._wire = wire
        self.scratch = Scratch()

    @property
    def plain(self) -> DenseWire:
        """The plain codec, in fp32."""
        return self._wire

    def numbers(self, bucket: Bucket, message: Tensor) -> Tensor:
        """Return the scales: if these are finite, all values are."""
        if message.numel() == bucket.numel:
            return message
        return self._scales(message, bucket.numel)

    def extra_bytes(self, bucket: Bucket, nbytes: int) -> int:
        """Return the bytes moved to read and write the target in fp32."""
        return 2 * (bucket.numel * self.dtype.itemsize - nbytes)

    def add(self, bucket: Bucket, message: Tensor, target: Tensor, alpha: float = 1.0) -> None:
        """Add ``alpha`` times the values in ``message`` to ``target``."""
        if target.is_meta:
            return
        if message.numel() == bucket.numel:
            self._wire.add(bucket, message, target, alpha)
        else:
            self._add_encoded(message, target, alpha)

    @abstractmethod
    def _scales(self, message: Tensor, numel: int) -> Tensor:
        """Return the scales in an encoded message about ``numel`` values."""

    @abstractmethod
    def _add_encoded(self, message: Tensor, target: Tensor, alpha: float) -> None:
        """Add ``alpha`` times the values in an encoded message to ``target``."""


class ShadowEncoder(ModelEncoder):
    """Encoder of the difference of a model from a shadow of each receiver's copy, in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self._scratch = Scratch()

    def adopt(self, rank: int, bucket: Bucket, values: Tensor) -> None:
        """Record that the receiver has ``values``, whatever the model's dtype."""
        # Adding makes negative zeros positive, see quantise_difference().
        shadow = values if values.is_meta else values.float() + 0.0
        self._last[rank, bucket.index] = shadow

    def _whole(self, rank: int, bucket: Bucket, values: Tensor, out: Tensor) -> Tensor:
        """Return a message with all of ``values``, in ``out``."""
        self.adopt(rank, bucket, values)
        message = cut(out, 0, bucket.numel)
        if not values.is_meta:
            message.copy_(self._last[rank, bucket.index])
        return message

    def extra_bytes(self, bucket: Bucket, nbytes: int) -> int:
        """Return the bytes moved to read the values, and to read and write the shadow."""
        whole = bucket.numel * torch.float32.itemsize
        return 3 * whole - nbytes if nbytes < whole else whole


def on_device_of(out: Tensor, values: Tensor) -> Tensor:
    """Return ``out``, or as much memory on the device of ``values``."""
    return out if out.device == values.device else torch.empty_like(out, device=values.device)
