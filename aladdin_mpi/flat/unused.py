"""Parameters that a step's gradient does not reach, marked in the gradient itself.

torch's optimizers skip a parameter whose ``.grad`` is None: neither weight decay nor momentum
applies to it. A flat gradient cannot store None. Instead, the gradient of such a parameter is
zero with the sign set, -0.0, at the first value of its part of each bucket, and every other
gradient has +0.0 there if it is zero. In IEEE 754 -0.0 + -0.0 is -0.0, and any other sum is not:
a sum over workers is marked exactly if no worker used the parameter. The mark costs no bytes on
the wire, and every all-reduce library preserves it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, compress, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from aladdin_mpi.flat.layout import Bucket, Layout

Unused = Sequence[slice]
"""Parts of a vector that belong to unused parameters, in order."""


class _Segments(NamedTuple):
    """A bucket's segments of parameters, in order: parameter numbers and parts of the bucket."""

    numbers: list[int]
    parts: list[slice]

    def among(self, numbers: Collection[int]) -> list[int]:
        """Return the indices of the segments that belong to these parameters."""
        return [place for place, number in enumerate(self.numbers) if number in numbers]


class UnusedMarks:
    """Marks of unused parameters in a flat gradient, written and read bucket by bucket.

    Parameters are identified by their numbers in flat order; ``sizes`` has their lengths.
    """

    def __init__(self, sizes: Sequence[int], layout: Layout) -> None:
        self._edges = [0, *accumulate(sizes)]
        self._layout = layout
        self._segments: dict[int, _Segments] = {}
        self._heads: dict[int, Tensor] = {}

    def write(self, bucket: Bucket, values: Tensor, unused: Collection[int]) -> None:
        """Mark a bucket's gradient ``values``, which is 0 for the parameters ``unused``."""
        heads = self._heads_of(bucket, values)
        values.index_add_(0, heads, values.new_zeros(1).expand(len(heads)))  # -0.0 + 0.0 is 0.0
        if unused:
            segments = self._segments_of(bucket)
            for place in segments.among(unused):
                values[segments.parts[place].start].fill_(-0.0)

    def read(
        self, bucket: Bucket, values: Tensor, among: Collection[int] | None = None
    ) -> list[slice]:
        """Return the marked parts of a bucket's gradient, or of a sum.

        Waits for the device that computes it, if anything has to be read. Only the parameters
        ``among`` may be unused; None: all.
        """
        if values.is_meta or (among is not None and not among):
            return []
        segments = self._segments_of(bucket)
        places = range(len(segments.numbers)) if among is None else segments.among(among)
        if not places:
            return []
        heads = self._heads_of(bucket, values)
        first = values.index_select(0, heads if among is None else heads[places])
        marked = first.signbit().logical_and_(first == 0)
        if not marked.any():
            return []
        return [segments.parts[place] for place in compress(places, marked.tolist())]

    def parts(self, bucket: Bucket, unused: Collection[int]) -> list[slice]:
        """Return the parts of a bucket that belong to these parameters."""
        segments = self._segments_of(bucket)
        return [segments.parts[place] for place in segments.among(unused)]

    def _segments_of(self, bucket: Bucket) -> _Segments:
        if bucket.index not in self._segments:
            segments = self._segments[bucket.index] = _Segments([], [])
            for number, (start, stop) in enumerate(pairwise(self._edges)):
                first, last = max(start, bucket.start), min(stop, bucket.stop)
                if first < last:
                    segments.numbers.append(number)
                    segments.parts.append(slice(first - bucket.start, last - bucket.start))
        return self._segments[bucket.index]

    def _heads_of(self, bucket: Bucket, like: Tensor) -> Tensor:
        if bucket.index not in self._heads:
            starts = [part.start for part in self._segments_of(bucket).parts]
            self._heads[bucket.index] = torch.tensor(starts, device=like.device)
        return self._heads[bucket.index]


def used_parts(length: int, unused: Unused) -> Iterator[slice]:
    """Yield the parts of a vector of ``length`` values that are not ``unused``."""
    start = 0
    for part in unused:
        if start < part.start:
            yield slice(start, part.start)
        start = part.stop
    if start < length:
        yield slice(start, length)


def shifted(unused: Unused, by: int) -> list[slice]:
    """Return the parts relative to a vector in which the current one starts at ``by``."""
    return [slice(each.start + by, each.stop + by) for each in unused]


def joined(unused: Unused) -> list[slice]:
    """Return the parts with adjacent ones merged, as a parameter may span several buckets."""
    merged: list[slice] = []
    for each in unused:
        start = merged.pop().start if merged and merged[-1].stop == each.start else each.start
        merged.append(slice(start, each.stop))
    return merged


def within(part: slice, unused: Unused) -> list[slice]:
    """Return the ``unused`` parts of a flat vector that lie in ``part``, relative to its start."""
    inside = [
        slice(max(each.start - part.start, 0), min(each.stop, part.stop) - part.start)
        for each in unused
    ]
    return [each for each in inside if each.start < each.stop]
