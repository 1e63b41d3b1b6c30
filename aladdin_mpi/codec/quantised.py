"""Quantised gradients and models, and the choice of the wire's format."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.codec.base import DenseWire, GradientCodec, ModelDecoder
from aladdin_mpi.codec.quantise import (
    BITS,
    Scratch,
    add_dequantised,
    add_dequantised_to,
    message_length,
    quantise_difference,
    scales_of,
    take,
)
from aladdin_mpi.codec.residual import Residual
from aladdin_mpi.codec.scaled import ScaledCodec, ShadowEncoder, on_device_of
from aladdin_mpi.flat.layout import Bucket, Layout
from aladdin_mpi.flat.vectors import add, cut, full
from aladdin_mpi.options.general import QUANTISED_BITS, SUM_BITS
from aladdin_mpi.transport.base import Event


class QuantisedCodec(ScaledCodec):
    """The codec; a worker's residual is less than a step for any value.

    Values held back are in the residual too. Buckets of fewer than nine values are not quantised.
    Decoding needs no state. ``bits`` per value, 8, 4 or 2, may be changed at any time, as a
    message's length determines them.
    """

    def __init__(self, wire: DenseWire, layout: Layout, bits: int) -> None:
        super().__init__(wire)
        self.residual = Residual(layout.numel, wire.device)
        self.holds = True
        self.bits = bits

    def use(self, bits: int) -> None:
        """Encode further messages with ``bits`` bits per value."""
        self.bits = bits

    def length(self, bucket: Bucket) -> int:
        """Return the length of the next message about ``bucket``."""
        return message_length(bucket.numel, self.bits)

    def reads(self, bucket: Bucket, length: int) -> bool:
        """Return whether a message of ``length`` is quantised."""
        return length < bucket.numel and length in {message_length(bucket.numel, b) for b in BITS}

    def model_encoder(self) -> QuantisedEncoder:
        """Return an encoder of quantised differences."""
        return QuantisedEncoder(self.bits)

    def model_decoder(self) -> QuantisedDecoder:
        """Return the decoder for quantised differences."""
        return QuantisedDecoder(self.scratch)

    # -- memory ----------------------------------------------------------------
    def buffer_for(self, vector: Tensor) -> Tensor:
        """Return memory separate from ``vector``, which stays unchanged."""
        if vector.device.type == "cpu":
            # Messages fill a quarter of it; the rest of the memory is never touched.
            return torch.empty_like(vector, dtype=self.dtype)
        return self._wire.buffer(vector.numel())

    def wires(self, vector: Tensor, buckets: Sequence[Bucket]) -> list[Tensor]:
        """Return memory for one message about each bucket, with the largest number of bits."""
        lengths = [message_length(bucket.numel, BITS[0]) for bucket in buckets]
        buffer = self._wire.buffer(sum(lengths))
        ends = accumulate(lengths)
        return [cut(buffer, e - n, e) for e, n in zip(ends, lengths, strict=True)]

    # -- sending ---------------------------------------------------------------
    def compress(
        self, bucket: Bucket, values: Tensor, samples: int, out: Tensor
    ) -> tuple[Tensor, Event | None]:
        """Encode the sum of the residual and ``values``; keep the rounding error."""
        out = cut(out, 0, self.length(bucket))
        if values.is_meta:
            return out, None
        message, left = on_device_of(out, values), self.residual.on(values.device)
        take(values, left[bucket.part], message, self.bits, self.scratch)
        return self._wire.stage(message, out)

    def hold(self, bucket: Bucket, values: Tensor) -> None:
        """Add ``values`` to the residual."""
        if not values.is_meta:
            add(bucket.of(self.residual.on(values.device)), values)

    def add_held(self, bucket: Bucket, target: Tensor, alpha: float) -> None:
        """Add ``alpha`` times the residual to ``target``."""
        if not target.is_meta:
            add(target, bucket.of(self.residual.on(target.device)), alpha)

    # -- receiving -------------------------------------------------------------
    def _scales(self, message: Tensor, numel: int) -> Tensor:
        return scales_of(message, numel)

    def _add_encoded(self, message: Tensor, target: Tensor, alpha: float) -> None:
        add_dequantised(message, target, alpha, self.scratch)

    def state_without_held(self) -> dict[str, Any]:
        """Return the state of a codec that has sent nothing yet."""
        return {"left": None}

    def add_to(
        self, bucket: Bucket, message: Tensor, targets: Sequence[tuple[Tensor, float]]
    ) -> None:
        """Add a message's values to several targets, decoding it once."""
        if targets[0][0].is_meta or message.numel() == bucket.numel:
            super().add_to(bucket, message, targets)
        else:
            add_dequantised_to(message, targets, self.scratch)

    # -- checkpoints -------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the residual."""
        return self.residual.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the residual."""
        self.residual.load_state_dict(state)

    def scale_held_back(self, factor: float) -> None:
        """Scale the residual."""
        self.residual.scale_held_back(factor)


class QuantisedEncoder(ShadowEncoder):
    """Encoder of quantised differences.

    Args:
        bits: bits per value, 8 or 4, for receivers without a call of :meth:`use`.
    """

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits
        self._bits: dict[int, int] = {}

    def use(self, rank: int, level: float) -> None:
        """Use ``level`` bits per value for ``rank``."""
        self._bits[rank] = int(level)

    def encode(
        self, rank: int, bucket: Bucket, values: Tensor, out: Tensor, always: int = 0
    ) -> Tensor:
        """Encode the difference from the shadow; the first message is the whole bucket."""
        bits = self._bits.get(rank, self.bits)
        length = message_length(bucket.numel, bits)
        shadow = self._last.get((rank, bucket.index))
        if shadow is None or length == bucket.numel:
            return self._whole(rank, bucket, values, out)
        message = cut(out, 0, length)
        if not values.is_meta:
            written = on_device_of(message, values)
            quantise_difference(values, shadow, written, bits, self._scratch)
            if written is not message:
                message.copy_(written)
        return message


class QuantisedDecoder(ModelDecoder):
    """Decoder whose copy is bit-identical to the sender's shadow.

    Args:
        scratch: temporary memory, which others may use between messages.
    """

    def __init__(self, scratch: Scratch) -> None:
        super().__init__()
        self._scratch = scratch

    def _update(self, last: Tensor, message: Tensor) -> None:
        add_dequantised(message, last, 1.0, self._scratch)


def bits_of(name: str) -> tuple[int, ...]:
    """Return the bits per value that a ``--wire`` allows, in decreasing order."""
    if name == "auto":
        return tuple(sorted(QUANTISED_BITS.values(), reverse=True))
    return (SUM_BITS.get(name, 8 * _dtype(name).itemsize),)


def _dtype(name: str) -> torch.dtype:
    return torch.bfloat16 if name == "bf16" else torch.float32


def make_codec(
    name: str,
    layout: Layout,
    device: torch.device,
    moves_bytes: bool = True,
    dtype: torch.dtype | None = None,
) -> GradientCodec:
    """Return the codec of a ``--wire``.

    ``fp32`` does not round models in float64 either. ``dtype`` is that of the flat vector; None:
    float32. ``device`` and ``moves_bytes`` are those of :class:`DenseWire`.
    """
    on_wire = _dtype(name)
    if name == "fp32" and dtype is not None:
        on_wire = full(dtype)
    wire = DenseWire(on_wire, device, moves_bytes)
    return QuantisedCodec(wire, layout, SUM_BITS[name]) if name in SUM_BITS else wire
