"""Signs of the largest values, with one scale for each span of 32768 values.

A span's scale is the mean magnitude of its selected values, and a selected value is encoded as the
scale with the value's sign. A span's threshold is estimated from a strided sample, and computed
from all of its values if the estimate selects far too many or too few. Values of the threshold's
magnitude are selected together, even if that exceeds the share: if all magnitudes are equal, the
whole span is selected and encoded exactly. Zeros are selected only with a share of 1.

A message consists of fp32 words:

- the scale of every span;
- three integers for each piece of up to eight spans: the number of selected values ``n``, the
  Rice parameter ``k`` and the bits of the last part below;
- for each piece, padded to a word: ``n`` sign bits, ``k`` planes of ``n`` bits with the low bits
  of the gaps between positions, and the rest of the gaps in unary, each ended by a one. With
  ``k = 0`` the last part is a bitmap. If all values of a piece are selected, only signs follow.

Each part begins at a byte, and lower bits come first. Fewer values than ``SMALLEST`` are sent
plainly; all other messages are shorter than that, so that the length determines the format.

References: Golomb-Rice codes with the parameter of Kiely, "Selecting the Golomb Parameter in Rice
Coding" (IPN Progress Report 42-159, 2004).

A span with values that are not finite has an infinite scale. So does one whose magnitudes exceed
fp32 in sum, which are beyond those of any training.

Operations run piece by piece, so that all memory passes but the first hit the cache. They take up
to 32 bytes of temporary memory for each value of a piece, thus at most 8 MB, besides ``scratch``.
"""

from __future__ import annotations

from itertools import pairwise
from math import ceil, expm1, floor, inf, log, log1p, log2, sqrt
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from aladdin_mpi.codec.quantise import WORD, Scratch

SPAN_BITS = 15
SPAN = 1 << SPAN_BITS
"""Number of values that share a scale."""
PIECE = 8 * SPAN
"""Number of values encoded together; fits a core's cache."""
SAMPLE = 2048
"""Smallest number of a span's values that determine its threshold, if it has as many."""
TOLERANCE = 0.5
"""Largest relative deviation from the share before a threshold is computed exactly."""
SLACK = 8
"""Number of values by which a span may deviate further."""
SMALLEST = 6
"""Smallest number of values whose longest message is shorter than they are."""
HEADER = 3
"""Words of a piece's header."""
DENORMAL = 2.0**-149
"""The smallest positive number of fp32: a threshold that excludes zeros."""
GOLDEN = log((sqrt(5) - 1) / 2)


def longest_message(numel: int) -> int:
    """Return the words of the longest message about ``numel`` values: two bits for each."""
    if numel < SMALLEST:
        return numel
    bodies = sum(_words(2 * piece.size, 8, 8) for piece in _pieces(numel))
    return _spans(numel) + HEADER * len(_pieces(numel)) + bodies


def expected_length(numel: int, share: float) -> int:
    """Return the mean words of a message about ``numel`` values at independent positions."""
    if numel < SMALLEST:
        return numel
    length = _spans(numel) + HEADER * len(_pieces(numel))
    for piece in _pieces(numel):
        number = min(piece.size, max(1, round(share * piece.size)))
        k = _rice_parameter(number, piece.size)
        unary = 0.0
        if number < piece.size:
            # Gaps are geometric, and so are their upper bits.
            unary = number / -expm1(2**k * log1p(-number / piece.size))
        length += _words(number, number * k, ceil(unary))
    return min(length, longest_message(numel))


def scales_of(message: Tensor, numel: int) -> Tensor:
    """Return a message's scales (or its plain values): finite only if all decoded values are."""
    return message if numel < SMALLEST else message[: _spans(numel)]


def encode(values: Tensor, share: float, message: Tensor, scratch: Scratch) -> Tensor:
    """Encode the largest ``share`` of ``values``, and subtract what was encoded from them.

    The remaining values are the residual of error feedback. A span that is not finite invalidates
    the message, and is cleared so that it does not affect the next one.

    Args:
        values: flat, in fp32; changed at the coded positions only, to ``value - (+-scale)``.
        share: of each span, in (0, 1].
        message: memory of at least :func:`longest_message` words, on the same device.
        scratch: temporary memory for one piece.

    Returns:
        The message, the front part of ``message``.
    """
    numel = values.numel()
    if numel < SMALLEST:
        message[:numel].copy_(values)
        values.zero_()
        return message[:numel]
    writer = _Writer(message, numel)
    for piece in _pieces(numel):
        part = values[piece.part]
        code = _select(part.view(-1, piece.width), share, scratch)
        code.apply(part, -1)
        if not code.scales.isfinite().all():
            part.view(-1, piece.width).masked_fill_(~code.scales.isfinite().unsqueeze(1), 0)
        writer.write(code)
    return writer.close()


def encode_difference(
    values: Tensor, shadow: Tensor, share: float, message: Tensor, scratch: Scratch
) -> Tensor:
    """Encode the largest ``share`` of ``values - shadow``, and add what was encoded to ``shadow``.

    The shadow is then bit-identical to a copy of it after :func:`add`, on any device, unless the
    difference was not finite. Arguments and result as of :func:`encode`.
    """
    numel = values.numel()
    if numel < SMALLEST:
        shadow.add_(torch.sub(values, shadow, out=message[:numel]))
        return message[:numel]
    writer = _Writer(message, numel)
    for piece in _pieces(numel):
        part = shadow[piece.part]
        moved = torch.sub(values[piece.part], part, out=scratch.like(part, 2))
        code = _select(moved.view(-1, piece.width), share, scratch)
        code.apply(part, 1)
        writer.write(code)
    return writer.close()


def add(message: Tensor, target: Tensor, alpha: float = 1.0) -> None:
    """Compute ``target <- target + alpha * values`` at the coded positions.

    The product ``alpha * scale`` is rounded before it is added. ``target`` is flat, in fp32 and on
    the same device.
    """
    numel = target.numel()
    if message.numel() == numel:
        target.add_(message, alpha=alpha)
        return
    pieces, spans = _pieces(numel), _spans(numel)
    scales = message[:spans] * alpha
    end = spans + HEADER * len(pieces)
    headers = message[spans:end].view(torch.int32).view(-1, HEADER).tolist()
    for piece, (number, k, unary) in zip(pieces, headers, strict=True):
        body = message[end:].view(torch.uint8)
        end += _words(number, number * k, unary)
        positions = None if number == piece.size else _read_positions(body, number, k, unary)
        signs = _unpack(body, number).to(torch.float32).mul_(-2).add_(1)
        _Code(scales[piece.spans], signs, positions).apply(target[piece.part], 1)


class _SpanGroup(NamedTuple):
    """Spans of one width; slices of the values and of the scales."""

    part: slice
    spans: slice
    width: int

    @property
    def size(self) -> int:
        return self.part.stop - self.part.start


def _pieces(numel: int) -> list[_SpanGroup]:
    """Return full spans in groups, then the rest."""
    full = numel - numel % SPAN
    bounds = [(*pair, SPAN) for pair in pairwise([*range(0, full, PIECE), full])]
    if full < numel:
        bounds.append((full, numel, numel - full))
    return [
        _SpanGroup(slice(start, stop), slice(start // SPAN, _spans(stop)), width)
        for start, stop, width in bounds
    ]


class _Code(NamedTuple):
    """Selected values of a piece; ``positions`` are None if all are selected."""

    scales: Tensor
    signs: Tensor
    """1 or -1 for every selected value."""
    positions: Tensor | None
    mask: Tensor | None = None
    """The positions as a mask, if it has been computed."""

    def apply(self, target: Tensor, alpha: float) -> None:
        """Add ``alpha``, 1 or -1, times the encoded values to ``target``, one part of a vector."""
        if self.positions is None:
            signs = self.signs.view(self.scales.numel(), -1)
            target.view_as(signs).add_(signs * self.scales.unsqueeze(1), alpha=alpha)
            return
        encoded = self.scales.index_select(0, self.positions >> SPAN_BITS).mul_(self.signs)
        moved = target.index_select(0, self.positions).add_(encoded, alpha=alpha)
        # Not index_add_(): on a GPU its atomic operations flush denormals.
        target.scatter_(0, self.positions, moved)


def _select(x: Tensor, share: float, scratch: Scratch) -> _Code:
    """Select the largest magnitudes of each row, a span, and compute their mean."""
    magnitudes = torch.abs(x, out=scratch.like(x))
    if share >= 1:
        return _Code(_infinite_if_bad(magnitudes.mean(1)), _signs(x.view(-1)), None)
    chosen = scratch.like(x, 1)
    counts = _choose(magnitudes, share, chosen)
    mask = chosen.view(-1).bool()
    scales = _infinite_if_bad(magnitudes.mul_(chosen).sum(1).div_(counts.clamp_min_(1)))
    positions = _positions(mask)
    if positions.numel() == x.numel():
        return _Code(scales, _signs(x.view(-1)), None)
    return _Code(scales, _signs(x.view(-1).index_select(0, positions)), positions, mask)


def _choose(magnitudes: Tensor, share: float, chosen: Tensor) -> Tensor:
    """Set ``chosen`` to 1 for magnitudes of at least their row's threshold, else to 0.

    Returns:
        The number of chosen magnitudes of each row, in fp32, which is exact below 2^24.
    """
    width = magnitudes.shape[1]
    # Odd, so that a sample does not fall into few columns of a matrix.
    stride = max(1, (width // SAMPLE - 1) | 1)
    thresholds = _thresholds(magnitudes[:, ::stride], share)
    counts = torch.ge(magnitudes, thresholds, out=chosen).sum(1)
    if stride == 1:
        return counts
    least, most = ((1 + sign * TOLERANCE) * share * width + sign * SLACK for sign in (-1, 1))
    too_few = (counts < least) & (thresholds.view(-1) > DENORMAL)
    rows = (too_few | (counts > most)).nonzero().view(-1)
    if rows.numel():
        some = magnitudes[rows]
        chosen[rows] = some.ge(_thresholds(some, share)).to(chosen.dtype)
        counts = chosen.sum(1)
    return counts


def _thresholds(magnitudes: Tensor, share: float) -> Tensor:
    """Return the smallest of the largest ``share`` of each row's magnitudes, if it is not zero."""
    width = magnitudes.shape[1]
    number = max(1, round(share * width))
    thresholds = magnitudes.kthvalue(width - number + 1, 1, keepdim=True).values
    return thresholds.nan_to_num_(nan=0.0).clamp_min_(DENORMAL)


def _infinite_if_bad(scales: Tensor) -> Tensor:
    """Replace NaN by infinity: a message that begins with a NaN counts as damaged."""
    return scales.nan_to_num_(nan=inf, posinf=inf)


def _signs(x: Tensor) -> Tensor:
    return torch.copysign(torch.ones((), device=x.device), x)


class _Writer:
    """Writes a message about ``numel`` values from front to back."""

    def __init__(self, message: Tensor, numel: int) -> None:
        self._message = message
        self._scales = 0
        self._spans = _spans(numel)
        self._end = self._spans + HEADER * len(_pieces(numel))
        self._headers: list[int] = []

    def write(self, code: _Code) -> None:
        """Append a piece."""
        spans = code.scales.numel()
        self._message[self._scales : self._scales + spans].copy_(code.scales)
        self._scales += spans
        k, parts = 0, [code.signs < 0]
        if code.positions is not None and code.mask is not None:
            k = _rice_parameter(code.signs.numel(), code.mask.numel())
            parts += _position_bits(code.positions, code.mask, k)
        bits = [part.numel() for part in parts]
        self._headers += [bits[0], k, bits[-1] if len(bits) > 1 else 0]
        packed = torch.cat([_pack(part) for part in parts])
        end = self._end + _words(*bits)
        body = self._message[self._end : end].view(torch.uint8)
        body[: packed.numel()].copy_(packed)
        body[packed.numel() :].zero_()
        self._end = end

    def close(self) -> Tensor:
        """Write the headers; return the message."""
        headers = self._message[self._spans : self._spans + len(self._headers)]
        headers.view(torch.int32).copy_(torch.tensor(self._headers, dtype=torch.int32))
        return self._message[: self._end]


def _position_bits(positions: Tensor, mask: Tensor, k: int) -> list[Tensor]:
    """Return the low bits and the unary part of the positions' code."""
    number = positions.numel()
    if not k:
        return [mask] if number else []
    gaps = torch.diff(positions, prepend=positions.new_full((1,), -1)).sub_(1)
    low = (gaps.int() >> _planes(k, gaps.device)).bitwise_and_(1)
    ends = (gaps >> k).add_(1).cumsum(0).sub_(1)
    unary = mask.new_zeros(int(ends[-1]) + 1).index_fill_(0, ends, True)
    return [low.view(-1).bool(), unary]


def _read_positions(body: Tensor, number: int, k: int, unary: int) -> Tensor:
    """Return the positions that :func:`_position_bits` has encoded."""
    first = _bytes(number)
    second = first + _bytes(number * k)
    ends = _positions(_unpack(body[second:], unary))
    if not k:
        return ends
    planes = _unpack(body[first:], number * k).view(k, number)
    low = planes.int().bitwise_left_shift_(_planes(k, body.device)).sum(0)
    # The sum of all gaps up to each position, of which the unary part counts 2^k.
    gaps = ends.sub_(torch.arange(number, device=body.device)).bitwise_left_shift_(k)
    return low.add_(1).cumsum(0).add_(gaps).sub_(1)


def _rice_parameter(number: int, size: int) -> int:
    """Return the best number of low bits for gaps between ``number`` of ``size`` positions."""
    if not 0 < number < size:
        return 0
    return max(0, 1 + floor(log2(GOLDEN / log1p(-number / size))))


def _planes(k: int, device: torch.device) -> Tensor:
    return torch.arange(k, dtype=torch.int32, device=device).unsqueeze(1)


def _on_host(x: Tensor) -> bool:
    """Return whether NumPy can read ``x``: its functions for bits are 2 to 8 times as fast."""
    return x.device.type == "cpu"


def _positions(mask: Tensor) -> Tensor:
    """Return the positions of the ones, in order."""
    if _on_host(mask):
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().view(-1)


def _pack(bits: Tensor) -> Tensor:
    """Pack bits into bytes, lower bits first."""
    if _on_host(bits):
        return torch.from_numpy(np.packbits(bits.numpy(), bitorder="little"))
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.numel() % 8)).view(-1, 8)
    return (padded << _shifts(bits.device)).sum(1, dtype=torch.uint8)


def _unpack(packed: Tensor, number: int) -> Tensor:
    """Return the first ``number`` bits."""
    if _on_host(packed):
        bits = np.unpackbits(packed[: _bytes(number)].numpy(), count=number, bitorder="little")
        return torch.from_numpy(bits).view(torch.bool)
    bytes_ = packed[: _bytes(number)].unsqueeze(1)
    return ((bytes_ >> _shifts(packed.device)) & 1).view(-1)[:number].bool()


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def _spans(numel: int) -> int:
    return -(-numel // SPAN)


def _bytes(bits: int) -> int:
    return -(-bits // 8)


def _words(*parts: int) -> int:
    """Return the words of parts of so many bits, each of which begins at a byte."""
    return -(-sum(map(_bytes, parts)) // WORD)
