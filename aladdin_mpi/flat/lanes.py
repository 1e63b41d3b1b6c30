"""Lanes: parts of a model, each trained by its own ranks.

A lane's flat vector consists of ranges of the whole model's, in the same order. An algorithm trains
it as if it were a model. A parameter's values in a lane are adjacent in that vector.

If every rank has the whole model, each lane has one of equally many pieces of every bucket, so that
all lanes have complete buckets equally early in backward. If the ranks of an island have a part of
each parameter, these parts form the lanes (:mod:`aladdin_mpi.flat.shards`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.layout import Bucket, Layout
from aladdin_mpi.flat.replica import FlatModel, Outline, PhantomReplica, Replica
from aladdin_mpi.flat.vectors import copy, sizes


class Lane:
    """One of ``count`` lanes of a model.

    Args:
        number: of the lane, from 0.
        ranges: parts of the whole vector that form the lane's, in order and disjoint.
        layout: of the lane's vector.
    """

    def __init__(self, number: int, count: int, ranges: Sequence[slice], layout: Layout) -> None:
        self.number, self.count = number, count
        self.layout = layout
        self._ranges = [each for each in ranges if each.start < each.stop]
        self._starts = [each.start for each in self._ranges]
        lengths = (each.stop - each.start for each in self._ranges)
        self._places = [*accumulate(lengths, initial=0)]
        """Starts of the ranges in the lane's vector, and its length."""

    def narrow(self, part: slice) -> slice:
        """Return the lane's share of a part of the whole vector, as a part of the lane's vector."""
        return slice(self._place(part.start), self._place(part.stop))

    def _place(self, position: int) -> int:
        """Return the number of the lane's values before a position of the whole vector."""
        index = bisect_right(self._starts, position) - 1
        if index < 0:
            return 0
        return min(self._places[index] + position - self._starts[index], self._places[index + 1])

    def sizes(self, whole: Sequence[int]) -> list[int]:
        """Return the number of values of each parameter, given those in the whole vector."""
        places = [self._place(edge) for edge in accumulate(whole, initial=0)]
        return [stop - start for start, stop in pairwise(places)]

    def shared(self, other: Lane) -> list[tuple[slice, slice]]:
        """Return the places of the values that both lanes have: in this vector, and in the other.

        Both are in order, and values that are adjacent in both vectors form one place.
        """
        found: list[tuple[slice, slice]] = []
        mine = theirs = 0
        here = there = slice(0, 0)
        while mine < len(self._ranges) and theirs < len(other._ranges):
            a, b = self._ranges[mine], other._ranges[theirs]
            start, stop = max(a.start, b.start), min(a.stop, b.stop)
            if start < stop:
                first = self._places[mine] + start - a.start
                second = other._places[theirs] + start - b.start
                if found and (here.stop, there.stop) == (first, second):
                    found.pop()
                else:
                    here, there = slice(first, first), slice(second, second)
                here = slice(here.start, first + stop - start)
                there = slice(there.start, second + stop - start)
                found.append((here, there))
            mine, theirs = mine + (a.stop <= b.stop), theirs + (b.stop <= a.stop)
        return found

    def widen(self, part: slice) -> list[slice]:
        """Return the parts of the whole vector that form a part of the lane's vector."""
        found = []
        for each, (first, last) in zip(self._ranges, pairwise(self._places), strict=True):
            start, stop = max(part.start, first), min(part.stop, last)
            if start < stop:
                found.append(slice(each.start + start - first, each.start + stop - first))
        return found


class PieceLane(Lane):
    """A lane of a model that every rank has as a whole: a piece of each bucket.

    Attributes:
        whole: layout of the whole model.
        pieces: the lane's buckets, as parts of the whole vector; their numbers are the whole's.
    """

    def __init__(self, whole: Layout, number: int, count: int) -> None:
        self.whole = whole
        self.pieces = whole if count == 1 else _pieces(whole, number, count)
        layout = whole if count == 1 else _adjoined(self.pieces)
        super().__init__(number, count, [piece.part for piece in self.pieces.buckets], layout)

    def gather(self, whole: Tensor, out: Tensor) -> None:
        """Copy the lane's values from the whole vector to the lane's vector ``out``."""
        for piece, bucket in zip(self.pieces.buckets, self.layout.buckets, strict=True):
            copy(bucket.of(out), piece.of(whole))

    def scatter(self, values: Tensor, whole: Tensor) -> None:
        """Copy the lane's vector ``values`` to their places in the whole vector."""
        for piece, bucket in zip(self.pieces.buckets, self.layout.buckets, strict=True):
            copy(piece.of(whole), bucket.of(values))


def _pieces(whole: Layout, number: int, count: int) -> Layout:
    """Return one of ``count`` equal pieces of each bucket."""
    pieces = (
        Bucket(
            bucket.index,
            bucket.start + bucket.numel * number // count,
            bucket.start + bucket.numel * (number + 1) // count,
            bucket.server,
        )
        for bucket in whole.buckets
    )
    return Layout(whole.numel, whole.servers, tuple(pieces))


def _adjoined(pieces: Layout) -> Layout:
    """Return the layout of a vector of these pieces, one after another."""
    stops = [*accumulate(piece.numel for piece in pieces.buckets)]
    buckets = (
        Bucket(piece.index, stop - piece.numel, stop, piece.server)
        for piece, stop in zip(pieces.buckets, stops, strict=True)
    )
    return Layout(stops[-1], pieces.servers, tuple(buckets))


def make_lanes(whole: Layout, count: int) -> list[PieceLane]:
    """Return all lanes of a model that every rank has as a whole.

    Raises:
        UserError: a bucket has fewer values than there are lanes.
    """
    smallest = min(bucket.numel for bucket in whole.buckets)
    if smallest < count:
        raise UserError(
            f"--island: the model has {whole.numel} parameters in {len(whole.buckets)} buckets, "
            f"the smallest with {smallest}, too few for {count} parts. Use smaller islands, or "
            "larger buckets (--bucket-mb)."
        )
    return [PieceLane(whole, number, count) for number in range(count)]


def make_sharded_lanes(held: Sequence[Sequence[slice]], cut: Callable[[int], Layout]) -> list[Lane]:
    """Return all lanes of a model of which each rank has a part.

    Args:
        held: for each lane, the parts of the whole vector that it has.
        cut: returns the layout of a vector of this length.
    """
    lengths = [sum(each.stop - each.start for each in ranges) for ranges in held]
    lanes = zip(held, lengths, strict=True)
    return [Lane(i, len(held), ranges, cut(numel)) for i, (ranges, numel) in enumerate(lanes)]


class LaneReplica(FlatModel):
    """A lane of a model, as an algorithm sees it: a model whose parameters are rows of values.

    Without a lane it has no values, for a rank that only computes gradients.

    Args:
        whole: the whole model.
        lane: the lane; None: no values.
    """

    def __init__(self, whole: Replica | PhantomReplica, lane: PieceLane | None) -> None:
        self.whole = whole
        self._lane = lane
        rows = () if lane is None else lane.sizes(whole.sizes)
        like = whole.parameters
        if like.is_meta:
            parameters = sizes(sum(rows), like.dtype)
        else:
            parameters = torch.empty(sum(rows), dtype=like.dtype, device=like.device)
        super().__init__(rows_of(rows), parameters, whole.outside)
        self.refresh()

    def refresh(self) -> None:
        """Copy the values from the whole model."""
        if self._lane is not None:
            self._lane.gather(self.whole.parameters, self.parameters)


def rows_of(sizes: Sequence[int]) -> Outline:
    """Return the outline of a model whose parameters are rows of these numbers of values."""
    return Outline(tuple((size,) for size in sizes), tuple(sizes))
