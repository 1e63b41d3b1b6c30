"""Values in few bits: blocks of 256, each with a scale and whole steps of it.

A block's scale is its largest magnitude divided by the number of steps, 127 with 8 bits and
7 with 4; every value is rounded to the nearest step. A message is fp32 words: the scales, then
the steps, one to a byte or two, filled up to a word. Where two share a byte it is
``16 high + low``, which as a signed number has room for both and comes apart by rounding.

Everything goes piece by piece, so that all passes but the first find their values in the cache,
and nothing is allocated but a few words for each block.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from aladdin_mpi.flat import fused
from aladdin_mpi.flat.vectors import BLOCK, is_finite

WIDTH = 256
"""Values of a block."""
BITS = (8, 4)
"""Of a value; the other one's messages have another length."""
FUSED_BITS = 8
"""Of the messages that a GPU makes and reads in one kernel; see :mod:`aladdin_mpi.flat.fused`."""
SMALLEST = 5
"""Values from which a message is shorter than these, and its length says its bits."""
WORD = 4
"""Bytes of a word of a message."""
HIGH = 16
"""What the second of two values in a byte is multiplied by."""
TINY = 2.0**-126
"""The smallest normal number of fp32: its reciprocal is finite."""


def steps_of(bits: int) -> int:
    """Steps on either side of zero."""
    return int(2 ** (bits - 1) - 1)


def message_length(numel: int, bits: int) -> int:
    """Words of a message about ``numel`` values; ``numel``, the values as they are, if very few."""
    if numel < SMALLEST:
        return numel
    return _blocks(numel) + -(-_bytes(numel, bits) // WORD)


def bits_of(numel: int, length: int) -> int | None:
    """What a message of ``length`` words holds of ``numel`` values; None: the values.

    Raises:
        ValueError: no message has that length.
    """
    if length == numel:
        return None
    for bits in BITS:
        if length == message_length(numel, bits):
            return bits
    lengths = [numel, *(message_length(numel, bits) for bits in BITS)]
    raise ValueError(f"length: expected one of {lengths} for {numel} values, got {length}")


def scales_of(message: Tensor, numel: int) -> Tensor:
    """A message's scales: what is not finite in a block shows in its scale."""
    return message[: _blocks(numel)]


class Scratch:
    """Memory for pieces, kept from call to call."""

    def __init__(self) -> None:
        self._memory: dict[int, Tensor] = {}

    def like(self, x: Tensor, number: int = 0) -> Tensor:
        """Of the shape of ``x``; it holds anything. Different numbers are apart."""
        memory = self._memory.get(number)
        if memory is None or memory.numel() < x.numel() or memory.device != x.device:
            memory = self._memory[number] = torch.empty(x.numel(), device=x.device)
        return memory[: x.numel()].view(x.shape)


def quantise(values: Tensor, left: Tensor, message: Tensor, bits: int, scratch: Scratch) -> None:
    """``left <- left + values``, and what a message can hold of it goes into the message.

    What rounding loses stays in ``left``, but for blocks that are not finite: these make the
    message useless, and the next one is to be sound again.

    Args:
        values: flat, in fp32; at least ``SMALLEST``.
        left: as long.
        message: of :func:`message_length`, on the same device.
        bits: 8 or 4.
        scratch: for one piece.
    """
    if bits == FUSED_BITS and fused.is_usable(values, left, message):
        fused.quantise(values, left, message, steps_of(bits), WIDTH, TINY)
        return
    message[-1:].zero_()
    for piece in _pieces(message, values.numel(), bits):
        rest = left[piece.part].add_(values[piece.part]).view(-1, piece.width)
        steps = scratch.like(rest)
        _round(rest, piece.scales, steps, bits)
        rest.addcmul_(steps, piece.scales, value=-1)
        if not (rest.device.type == "cpu" and is_finite(piece.scales)):
            rest.masked_fill_(~piece.scales.isfinite(), 0)
        _pack(steps, piece.packed, bits)


def quantise_difference(
    values: Tensor, shadow: Tensor, message: Tensor, bits: int, scratch: Scratch
) -> None:
    """Write ``values - shadow``, and have ``shadow`` follow by what has been written.

    It is then, to the bit, what :func:`add_dequantised` makes of a copy of the shadow, unless
    that holds a negative zero, which would become positive. Arguments as of :func:`quantise`.
    """
    message[-1:].zero_()
    for piece in _pieces(message, values.numel(), bits):
        last = shadow[piece.part].view(-1, piece.width)
        moved = scratch.like(last, 1)
        torch.sub(values[piece.part].view(-1, piece.width), last, out=moved)
        steps = scratch.like(last)
        _round(moved, piece.scales, steps, bits)
        last.add_(torch.mul(steps, piece.scales, out=moved))
        _pack(steps, piece.packed, bits)


def add_dequantised(message: Tensor, target: Tensor, alpha: float, scratch: Scratch) -> None:
    """``target <- target + alpha * values``.

    The products are rounded before they are added, so that the result is the same on every
    machine and device (with ``alpha`` 1): no compiler makes one operation of both. The message's
    length says its bits; ``target`` is flat, in fp32 and on the same device.
    """
    numel = target.numel()
    bits = bits_of(numel, message.numel())
    assert bits is not None
    if bits == FUSED_BITS and fused.is_usable(message, target):
        fused.add_dequantised(message, target, alpha, WIDTH)
        return
    for piece in _pieces(message, numel, bits):
        part = target[piece.part].view(-1, piece.width)
        steps = scratch.like(part)
        _unpack(piece.packed, steps, bits)
        part.add_(steps.mul_(piece.scales), alpha=alpha)


class _Piece(NamedTuple):
    """Blocks of one width; ``scales`` and ``packed`` are views of the message, a block a row."""

    part: slice
    width: int
    scales: Tensor
    packed: Tensor


def _pieces(message: Tensor, numel: int, bits: int) -> Iterator[_Piece]:
    """Full blocks, as many as a cache holds, or on other devices all; then the rest, if any."""
    blocks = _blocks(numel)
    scales, packed = message[:blocks].unsqueeze(1), message[blocks:].view(torch.int8)
    full = numel - numel % WIDTH
    step = BLOCK if message.device.type == "cpu" else max(full, 1)
    cuts = [*range(0, full, step), full]
    bounds = [(start, stop, WIDTH) for start, stop in pairwise(cuts)]
    if full < numel:
        bounds.append((full, numel, numel - full))
    for start, stop, width in bounds:
        first, rows = start // WIDTH, (stop - start) // width
        size = _bytes(width, bits)
        at = _bytes(start, bits)
        yield _Piece(
            slice(start, stop),
            width,
            scales[first : first + rows],
            packed[at : at + rows * size].view(rows, size),
        )


def _round(x: Tensor, scales: Tensor, steps: Tensor, bits: int) -> None:
    """The scale of every row, and its values as whole steps."""
    # A tenth of the time of vector_norm() with infinity, which no vector unit helps.
    torch.amax(torch.abs(x, out=steps), 1, keepdim=True, out=scales)
    scales.mul_(1 / steps_of(bits))
    torch.mul(x, scales.clamp_min(TINY).reciprocal_(), out=steps)
    steps.round_()


def _pack(steps: Tensor, packed: Tensor, bits: int) -> None:
    """Put whole steps into bytes; ``steps`` then holds anything."""
    if bits == 8:
        packed.copy_(steps)
        return
    low, high = _halves(steps)
    low[:, : high.shape[1]].add_(high, alpha=HIGH)
    packed.copy_(low)


def _unpack(packed: Tensor, steps: Tensor, bits: int) -> None:
    """The inverse of :func:`_pack`."""
    if bits == 8:
        steps.copy_(packed)
        return
    low, high = _halves(steps)
    low.copy_(packed)
    both = low[:, : high.shape[1]]
    torch.mul(both, 1 / HIGH, out=high)
    both.sub_(high.round_(), alpha=HIGH)


def _halves(steps: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values that are the low part of their byte, and those that are the high one."""
    low = _bytes(steps.shape[1], 4)
    return steps[:, :low], steps[:, low:]


def _blocks(numel: int) -> int:
    return -(-numel // WIDTH)


def _bytes(numel: int, bits: int) -> int:
    return -(-numel * bits // 8)
