"""Gradients and models in few bits, and the choice of the format on the wire."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.codec.base import DenseWire, GradientCodec, ModelDecoder, ModelEncoder
from aladdin_mpi.codec.quantise import (
    BITS,
    Scratch,
    add_dequantised,
    message_length,
    quantise,
    quantise_difference,
    scales_of,
)
from aladdin_mpi.flat.layout import Bucket, Layout
from aladdin_mpi.flat.vectors import cut, full
from aladdin_mpi.options.general import QUANTISED_BITS
from aladdin_mpi.transport.base import Event


class QuantisedCodec(GradientCodec):
    """The codec, with ``left``: what a worker has not sent yet, less than a step of any value.

    Buckets of less than five values are sent as they are. Decoding needs no state. ``wire``, where
    messages are staged, is in fp32. ``bits`` of a value, 8 or 4, may be set at any time, as a
    message's length tells them.
    """

    def __init__(self, wire: DenseWire, layout: Layout, bits: int) -> None:
        assert wire.dtype == torch.float32
        self.dtype = wire.dtype
        self.bits = bits
        self._wire = wire
        self._numel = layout.numel
        self._scratch = Scratch()
        self.left: Tensor | None = None
        """Flat; None as long as nothing has been sent."""

    @property
    def plain(self) -> DenseWire:
        """In fp32."""
        return self._wire

    def use(self, bits: int) -> None:
        """See :meth:`GradientCodec.use`."""
        self.bits = bits

    def length(self, bucket: Bucket) -> int:
        """Of the next message about ``bucket``."""
        return message_length(bucket.numel, self.bits)

    def reads(self, bucket: Bucket, length: int) -> bool:
        """Whether a message of ``length`` is in few bits."""
        return length < bucket.numel and length in {message_length(bucket.numel, b) for b in BITS}

    def numbers(self, bucket: Bucket, message: Tensor) -> Tensor:
        """The scales: if these are finite, all values are."""
        if message.numel() == bucket.numel:
            return message
        return scales_of(message, bucket.numel)

    def besides(self, bucket: Bucket, nbytes: int) -> int:
        """The target is read and written in fp32; see :meth:`GradientCodec.besides`."""
        whole = bucket.numel * self.dtype.itemsize
        return 2 * (whole - nbytes)

    def model_encoder(self) -> QuantisedEncoder:
        """See :meth:`GradientCodec.model_encoder`."""
        return QuantisedEncoder(self.bits)

    def model_decoder(self) -> QuantisedDecoder:
        """See :meth:`GradientCodec.model_decoder`."""
        return QuantisedDecoder()

    # -- memory ----------------------------------------------------------------
    def buffer_for(self, vector: Tensor) -> Tensor:
        """Apart from ``vector``, which stays as it is."""
        if vector.device.type == "cpu":
            # Messages fill a quarter of it: the rest of the memory is never touched.
            return torch.empty_like(vector, dtype=self.dtype)
        return self._wire.buffer(vector.numel())

    # -- sending ---------------------------------------------------------------
    def compress(
        self, bucket: Bucket, values: Tensor, samples: int, room: Tensor
    ) -> tuple[Tensor, Event | None]:
        """What ``left`` and ``values`` are together; see :meth:`GradientCodec.compress`."""
        room = cut(room, 0, self.length(bucket))
        if values.is_meta:
            return room, None
        if room.numel() == bucket.numel:
            return room, self._wire.encode(values, room)
        if self.left is None:
            self.left = torch.zeros(self._numel, device=values.device)
        message = _room(room, values)
        quantise(values, self.left[bucket.part], message, self.bits, self._scratch)
        return self._wire.stage(message, room)

    # -- receiving -------------------------------------------------------------
    def add(self, bucket: Bucket, message: Tensor, target: Tensor, alpha: float = 1.0) -> None:
        """See :meth:`GradientCodec.add`."""
        if target.is_meta:
            return
        if message.numel() == bucket.numel:
            self._wire.add(bucket, message, target, alpha)
        else:
            add_dequantised(message, target, alpha, self._scratch)

    # -- checkpoints -------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """``left``."""
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up ``left``."""
        saved = state["left"]
        self.left = None if saved is None else saved.to(self._wire.device, copy=True)

    def scale_held_back(self, factor: float) -> None:
        """See :meth:`GradientCodec.scale_held_back`."""
        if self.left is not None:
            self.left.mul_(factor)


class QuantisedEncoder(ModelEncoder):
    """Sends what a model has moved away from a shadow of what each receiver has.

    Args:
        bits: of a value, 8 or 4, for receivers that :meth:`use` has not been called for.
    """

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits
        self._bits: dict[int, int] = {}
        self._scratch = Scratch()

    def use(self, rank: int, bits: int) -> None:
        """See :meth:`ModelEncoder.use`."""
        self._bits[rank] = bits

    def encode(
        self, rank: int, bucket: Bucket, values: Tensor, room: Tensor, always: int = 0
    ) -> Tensor:
        """See :meth:`ModelEncoder.encode`."""
        key, bits = (rank, bucket.index), self._bits.get(rank, self.bits)
        length = message_length(bucket.numel, bits)
        shadow = self._last.get(key)
        if shadow is None or length == bucket.numel:
            return self._whole(key, values, cut(room, 0, bucket.numel))
        message = cut(room, 0, length)
        if not values.is_meta:
            written = _room(message, values)
            quantise_difference(values, shadow, written, bits, self._scratch)
            if written is not message:
                message.copy_(written)
        return message

    def _whole(self, key: tuple[int, int], values: Tensor, message: Tensor) -> Tensor:
        if values.is_meta:
            self._last[key] = values
        else:
            # In fp32, as the receiver's copy is, whatever the model has.
            # Adding makes negative zeros positive, see quantise_difference().
            self._last[key] = values.float() + 0.0
            message.copy_(self._last[key])
        return message

    def besides(self, bucket: Bucket, nbytes: int) -> int:
        """The values are read, the shadow is read and written; see :meth:`ModelEncoder.besides`."""
        whole = bucket.numel * torch.float32.itemsize
        return 3 * whole - nbytes if nbytes < whole else whole


class QuantisedDecoder(ModelDecoder):
    """Keeps a copy that is, to the bit, the sender's shadow."""

    def __init__(self) -> None:
        super().__init__()
        self._scratch = Scratch()

    def _update(self, last: Tensor, message: Tensor) -> None:
        add_dequantised(message, last, 1.0, self._scratch)


def _room(room: Tensor, values: Tensor) -> Tensor:
    """``room``, or as much on the device of ``values``."""
    return room if room.device == values.device else torch.empty_like(room, device=values.device)


def bits_of(name: str) -> tuple[int, ...]:
    """Return the bits of a value, most first, between which a ``--wire`` leaves the choice."""
    if name == "auto":
        return tuple(sorted(QUANTISED_BITS.values(), reverse=True))
    return (QUANTISED_BITS.get(name, 8 * _dtype(name).itemsize),)


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
    return QuantisedCodec(wire, layout, QUANTISED_BITS[name]) if name in QUANTISED_BITS else wire
