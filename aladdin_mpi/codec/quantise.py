"""Quantisation in blocks of 256 values, each with a scale and whole multiples of it (steps).

A block's scale is its largest magnitude divided by the number of steps, 127 with 8 bits and
7 with 4; every value is rounded to the nearest step. With 2 bits a value becomes -s, 0 or s, see
:func:`_round_to_signs`. A message consists of fp32 words: the scales, then the steps, one, two or
four to a byte, padded to a word. Two steps in a byte are stored as ``16 high + low``, four as
``64 d + 16 c + 4 b + a``, which fits a signed byte and is separated by rounding.

All operations run piece by piece, so that all memory passes but the first hit the cache, and
they allocate only a few words for each block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from aladdin_mpi.flat import fused
from aladdin_mpi.flat.vectors import BLOCK, is_finite

WIDTH = 256
"""Number of values in a block."""
BITS = (8, 4, 2)
"""Supported bits per value; their messages differ in length."""
FUSED_BITS = 8
"""Bits of messages that a GPU reads and writes in one kernel, see :mod:`aladdin_mpi.flat.fused`."""
SMALLEST = 9
"""Smallest number of values with a message that is shorter and of unambiguous length."""
WORD = 4
"""Bytes in a word of a message."""
THRESHOLD = 0.75
"""Smallest magnitude that 2 bits represent, relative to the mean magnitude of its block."""
TINY = 2.0**-126
"""The smallest normal number of fp32: its reciprocal is finite."""


def steps_of(bits: int) -> int:
    """Return the number of steps on either side of zero."""
    return int(2 ** (bits - 1) - 1)


def message_length(numel: int, bits: int) -> int:
    """Return the words of a message about ``numel`` values; very few values are sent plainly."""
    if numel < SMALLEST:
        return numel
    return _blocks(numel) + -(-_bytes(numel, bits) // WORD)


def bits_of(numel: int, length: int) -> int | None:
    """Return the bits per value of a message of ``length`` words; None: plain values.

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
    """Return a message's scales, which are finite only if all values are."""
    return message[: _blocks(numel)]


class Scratch:
    """Reusable temporary memory for pieces."""

    def __init__(self) -> None:
        self._memory: dict[int, Tensor] = {}

    def like(self, x: Tensor, number: int = 0) -> Tensor:
        """Return uninitialised memory of the shape of ``x``, distinct for each ``number``."""
        memory = self._memory.get(number)
        if memory is None or memory.numel() < x.numel() or memory.device != x.device:
            memory = self._memory[number] = torch.empty(x.numel(), device=x.device)
        return memory[: x.numel()].view(x.shape)


def quantise(values: Tensor, left: Tensor, message: Tensor, bits: int, scratch: Scratch) -> None:
    """Add ``values`` to ``left``, and move what a message can represent into ``message``.

    The rounding error stays in ``left``, except for blocks that are not finite: these invalidate
    the message but not the next one.

    Args:
        values: flat, in fp32; at least ``SMALLEST``.
        left: residual of the same length, in fp32 or, rounded, in bf16.
        message: length as by :func:`message_length`, on the same device.
        bits: 8, 4 or 2.
        scratch: temporary memory for one piece.
    """
    if bits == FUSED_BITS and fused.is_usable(values, message, rounded=(left,)):
        fused.quantise(values, left, message, steps_of(bits), WIDTH, TINY)
        return
    message[-1:].zero_()
    for piece in _pieces(message, values.numel(), bits):
        kept = left[piece.part].view(-1, piece.width)
        rest = kept if kept.dtype == torch.float32 else scratch.like(kept, 1)
        torch.add(kept, values[piece.part].view(-1, piece.width), out=rest)
        steps = scratch.like(rest)
        _round(rest, piece.scales, steps, bits)
        rest.addcmul_(steps, piece.scales, value=-1)
        if not (rest.device.type == "cpu" and is_finite(piece.scales)):
            rest.masked_fill_(~piece.scales.isfinite(), 0)
        if rest is not kept:
            kept.copy_(rest)
        _pack(steps, piece.packed, bits)


def quantise_difference(
    values: Tensor, shadow: Tensor, message: Tensor, bits: int, scratch: Scratch
) -> None:
    """Encode ``values - shadow``, and add the encoded difference to ``shadow``.

    The shadow is then bit-identical to a copy of it after :func:`add_dequantised`, unless it
    contains a negative zero, which would become positive. Arguments as of :func:`quantise`.
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
    """Compute ``target <- target + alpha * values``, as :func:`add_dequantised_to`."""
    add_dequantised_to(message, [(target, alpha)], scratch)


def add_dequantised_to(
    message: Tensor, targets: Sequence[tuple[Tensor, float]], scratch: Scratch
) -> None:
    """Compute ``target <- target + alpha * values`` for pairs of a target and alpha.

    Products are rounded before they are added, not fused by a compiler, so that the result is
    the same on every machine and device (with ``alpha`` 1). The message's length determines its
    bits; targets are flat, in fp32 or bf16, and on the same device.
    """
    numel = targets[0][0].numel()
    bits = bits_of(numel, message.numel())
    assert bits is not None
    if bits == FUSED_BITS and fused.is_usable(message, rounded=[each for each, _ in targets]):
        for target, alpha in targets:
            fused.add_dequantised(message, target, alpha, WIDTH)
        return
    for piece in _pieces(message, numel, bits):
        steps = scratch.like(targets[0][0][piece.part].view(-1, piece.width))
        _unpack(piece.packed, steps, bits)
        steps.mul_(piece.scales)
        for target, alpha in targets:
            target[piece.part].view(-1, piece.width).add_(steps, alpha=alpha)


def take(values: Tensor, left: Tensor, message: Tensor, bits: int, scratch: Scratch) -> None:
    """Move ``left + values`` into a message, as :func:`quantise`; very few are not rounded."""
    if message.numel() < values.numel():
        quantise(values, left, message, bits, scratch)
    else:
        message.copy_(values + left)
        left.zero_()


def add_message(message: Tensor, target: Tensor, scratch: Scratch) -> None:
    """Add the values in a message of :func:`take` to ``target``."""
    if message.numel() < target.numel():
        add_dequantised(message, target, 1.0, scratch)
    else:
        target.add_(message)


class _Piece(NamedTuple):
    """Blocks of one width; ``scales`` and ``packed`` view the message, one row per block."""

    part: slice
    width: int
    scales: Tensor
    packed: Tensor


def _pieces(message: Tensor, numel: int, bits: int) -> Iterator[_Piece]:
    """Yield full blocks in groups that fit the cache (or all, on other devices), then the rest."""
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
    """Compute the scale of every row, and its values as whole steps."""
    # Ten times as fast as vector_norm() with infinity, which is not vectorised.
    torch.amax(torch.abs(x, out=steps), 1, keepdim=True, out=scales)
    if bits == 2:
        _round_to_signs(x, scales, steps)
        return
    scales.mul_(1 / steps_of(bits))
    torch.mul(x, scales.clamp_min(TINY).reciprocal_(), out=steps)
    steps.round_()


def _round_to_signs(x: Tensor, scales: Tensor, steps: Tensor) -> None:
    """Round values to -s, 0 or s; ``scales`` are the largest magnitudes, ``steps`` all magnitudes.

    Of a block's k values above the threshold, s is the mean magnitude, which minimises the squared
    error: it is the squared norm less k s^2. The error is therefore always smaller than the values,
    by at least 1/(16 WIDTH) of the squared norm and by 0.8 of it for normal values, so that error
    feedback keeps the residual bounded (Karimireddy et al., ICML 2019, Lemma 3). The largest
    magnitude as s, as with more bits, would leave twice the error.
    """
    scales.clamp_min_(TINY)
    steps.mul_(scales.reciprocal())  # so that no sum overflows
    kept = steps >= THRESHOLD * steps.mean(1, keepdim=True)
    scales.mul_(steps.mul_(kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True))
    torch.sign(x, out=steps).mul_(kept)


def _pack(steps: Tensor, packed: Tensor, bits: int) -> None:
    """Pack whole steps into bytes; overwrites ``steps``."""
    first, *others = _fields(steps, bits)
    for place, field in enumerate(others, 1):
        first[:, : field.shape[1]].add_(field, alpha=2 ** (bits * place))
    packed.copy_(first)


def _unpack(packed: Tensor, steps: Tensor, bits: int) -> None:
    """Unpack steps; the inverse of :func:`_pack`."""
    first, *others = _fields(steps, bits)
    first.copy_(packed)
    for place, field in reversed([*enumerate(others, 1)]):
        factor = 2 ** (bits * place)
        rest = first[:, : field.shape[1]]
        torch.mul(rest, 1 / factor, out=field)
        rest.sub_(field.round_(), alpha=factor)


def _fields(steps: Tensor, bits: int) -> list[Tensor]:
    """Return the values in each field of their byte, lowest first; the last may be shorter."""
    return [*steps.split(_bytes(steps.shape[1], bits), 1)]


def _blocks(numel: int) -> int:
    return -(-numel // WIDTH)


def _bytes(numel: int, bits: int) -> int:
    return -(-numel * bits // 8)
