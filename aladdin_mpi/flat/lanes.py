"""Lanes: equal parts of a model, each trained by its own ranks.

Of every bucket of the whole model's layout, each lane has one of equally many pieces, so that all
lanes have complete buckets equally early in backward. The pieces of a lane, one after another,
form its flat vector, which an algorithm trains as if it were a model. A parameter's values in a
lane are adjacent in that vector, as both have the same order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.layout import Bucket, Layout
from aladdin_mpi.flat.replica import FlatModel, Outline, PhantomReplica, Replica
from aladdin_mpi.flat.vectors import copy, sizes


class Lane:
    """One of ``count`` lanes of a model.

    Attributes:
        whole: layout of the whole model.
        layout: of the lane's vector. Its buckets have the numbers of the whole model's.
        pieces: the same buckets as parts of the whole vector.
    """

    def __init__(self, whole: Layout, number: int, count: int) -> None:
        self.whole = whole
        self.number, self.count = number, count
        if count == 1:
            self.pieces = self.layout = whole
            return
        edges = [
            (
                bucket.start + bucket.numel * number // count,
                bucket.start + bucket.numel * (number + 1) // count,
            )
            for bucket in whole.buckets
        ]
        stops = [*accumulate(stop - start for start, stop in edges)]
        owned = [(bucket.index, bucket.server) for bucket in whole.buckets]
        self.pieces = Layout(
            whole.numel,
            whole.servers,
            tuple(Bucket(i, *edge, s) for (i, s), edge in zip(owned, edges, strict=True)),
        )
        self.layout = Layout(
            stops[-1],
            whole.servers,
            tuple(
                Bucket(i, stop - (edge[1] - edge[0]), stop, s)
                for (i, s), edge, stop in zip(owned, edges, stops, strict=True)
            ),
        )
        self._starts = [start for start, _ in edges]

    def narrow(self, part: slice) -> slice:
        """Return the lane's share of a part of the whole vector, as a part of the lane's vector."""
        if self.count == 1:
            return part
        return slice(self._place(part.start), self._place(part.stop))

    def _place(self, position: int) -> int:
        """Return the number of the lane's values before a position of the whole vector."""
        index = bisect_right(self._starts, position) - 1
        if index < 0:
            return 0
        piece, bucket = self.pieces.buckets[index], self.layout.buckets[index]
        return bucket.start + min(position - piece.start, piece.numel)

    def sizes(self, whole: Sequence[int]) -> list[int]:
        """Return the number of values of each parameter, given those in the whole vector."""
        if self.count == 1:
            return list(whole)
        places = [self._place(edge) for edge in accumulate(whole, initial=0)]
        return [stop - start for start, stop in pairwise(places)]

    def widen(self, part: slice) -> list[slice]:
        """Return the parts of the whole vector that form a part of the lane's vector."""
        if self.count == 1:
            return [part]
        found = []
        for piece, bucket in zip(self.pieces.buckets, self.layout.buckets, strict=True):
            start, stop = max(part.start, bucket.start), min(part.stop, bucket.stop)
            if start < stop:
                shift = piece.start - bucket.start
                found.append(slice(start + shift, stop + shift))
        return found

    def gather(self, whole: Tensor, out: Tensor) -> None:
        """Copy the lane's values from the whole vector to the lane's vector ``out``."""
        for piece, bucket in zip(self.pieces.buckets, self.layout.buckets, strict=True):
            copy(bucket.of(out), piece.of(whole))

    def scatter(self, values: Tensor, whole: Tensor) -> None:
        """Copy the lane's vector ``values`` to their places in the whole vector."""
        for piece, bucket in zip(self.pieces.buckets, self.layout.buckets, strict=True):
            copy(piece.of(whole), bucket.of(values))


def make_lanes(whole: Layout, count: int) -> list[Lane]:
    """Return all lanes of a model.

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
    return [Lane(whole, number, count) for number in range(count)]


class LaneReplica(FlatModel):
    """A lane of a model, as an algorithm sees it: a model whose parameters are rows of values.

    Without a lane it has no values, for a rank that only computes gradients.

    Args:
        whole: the whole model.
        lane: the lane; None: no values.
    """

    def __init__(self, whole: Replica | PhantomReplica, lane: Lane | None) -> None:
        self.whole = whole
        self._lane = lane
        rows = () if lane is None else lane.sizes(whole.sizes)
        like = whole.parameters
        if like.is_meta:
            parameters = sizes(sum(rows), like.dtype)
        else:
            parameters = torch.empty(sum(rows), dtype=like.dtype, device=like.device)
        outline = Outline(tuple((row,) for row in rows), tuple(rows))
        super().__init__(outline, parameters, whole.outside)
        self.refresh()

    def refresh(self) -> None:
        """Copy the values from the whole model."""
        if self._lane is not None:
            self._lane.gather(self.whole.parameters, self.parameters)
