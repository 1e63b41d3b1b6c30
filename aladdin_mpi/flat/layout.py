"""Division of the flat vector of parameters into shards for servers and buckets for the wire."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import ceil
from typing import Literal

from torch import Tensor

from aladdin_mpi.flat import vectors

BYTES_PER_MB = 1_000_000
BYTES_PER_VALUE = 4


@dataclass(frozen=True)
class Bucket:
    """A message's part of the flat vector: ``[start, stop)``, owned by ``server``.

    Buckets are numbered in the order in which backward completes them.
    """

    index: int
    start: int
    stop: int
    server: int

    @cached_property
    def part(self) -> slice:
        """The bucket's slice of the flat vector."""
        return slice(self.start, self.stop)

    @cached_property
    def numel(self) -> int:
        """Number of values."""
        return self.stop - self.start

    def of(self, vector: Tensor) -> Tensor:
        """Return the bucket's part of a flat vector, as a view."""
        return vectors.cut(vector, self.start, self.stop)


@dataclass(frozen=True)
class Layout:
    """``numel`` values, cut into ``buckets`` that together cover them in order."""

    numel: int
    servers: int
    buckets: tuple[Bucket, ...]

    @cached_property
    def largest(self) -> int:
        """Number of values in the largest bucket."""
        return max((bucket.numel for bucket in self.buckets), default=0)

    def owned_by(self, server: int) -> tuple[Bucket, ...]:
        """Return the buckets of one server, in order."""
        return self._owned.get(server, ())

    @cached_property
    def _owned(self) -> dict[int, tuple[Bucket, ...]]:
        owned: dict[int, list[Bucket]] = {}
        for bucket in self.buckets:
            owned.setdefault(bucket.server, []).append(bucket)
        return {server: tuple(buckets) for server, buckets in owned.items()}


def cut(
    numel: int,
    servers: int,
    bucket_mb: float,
    shard_mb: float,
    sharding: Literal["memory", "layer"] = "memory",
    layers: Sequence[int] = (),
) -> Layout:
    """Cut a flat vector into shards for servers and these into buckets for the wire.

    ``memory`` is memory-wise sharding (Ko et al., CIKM 2021, section 5.1): equal shards of
    at most ``shard_mb`` (fp32), regardless of layer boundaries, assigned to the servers in
    turn, the same number to each. This keeps all servers' links busy throughout backward.

    ``layer`` is layer-wise sharding (Ko et al., IPDPS 2021, section II): a whole layer
    belongs to one server. The largest remaining layer is assigned to the server with the
    fewest values, so that no server exceeds the lightest one by more than a layer; adjacent
    layers of one server form one shard, whatever its size.

    A shard is cut into equal buckets of at most ``bucket_mb``, the messages on the wire.

    Args:
        numel: length of the flat vector.
        servers: number of servers; 0 is treated as 1.
        bucket_mb: largest message in MB (10^6 bytes).
        shard_mb: largest shard in MB, with memory-wise sharding.
        sharding: sharding rule.
        layers: with ``layer``, the number of values of each layer in flat order.
    """
    owners = max(servers, 1)
    shard_values = max(1, int(shard_mb * BYTES_PER_MB) // BYTES_PER_VALUE)
    bucket_values = max(1, int(bucket_mb * BYTES_PER_MB) // BYTES_PER_VALUE)
    if sharding == "layer":
        shards = _by_layer(layers, owners)
    else:
        shards = _by_memory(numel, owners, shard_values)
    buckets: list[Bucket] = []
    for first, last, server in shards:
        pieces = ceil((last - first) / bucket_values)
        for piece in range(pieces):
            start = first + (last - first) * piece // pieces
            stop = first + (last - first) * (piece + 1) // pieces
            buckets.append(Bucket(len(buckets), start, stop, server))
    if sum(bucket.numel for bucket in buckets) != numel:
        raise ValueError(f"cut: expected layers of {numel} values in all, got {sum(layers)}")
    return Layout(numel, servers, tuple(buckets))


def between_parameters(layout: Layout, sizes: Sequence[int]) -> Layout:
    """Return a layout whose buckets, and so servers, hold whole parameters of these ``sizes``.

    A parameter belongs to the bucket in which it starts; buckets without a start are removed.
    """
    edges = [0, *accumulate(sizes)]
    buckets: list[Bucket] = []
    for bucket in layout.buckets:
        start = edges[bisect_left(edges, bucket.start)]
        stop = edges[bisect_left(edges, bucket.stop)]
        if start < stop:
            buckets.append(Bucket(len(buckets), start, stop, bucket.server))
    return Layout(layout.numel, layout.servers, tuple(buckets))


def _by_memory(numel: int, owners: int, largest: int) -> list[tuple[int, int, int]]:
    """Return start, stop and owner of equal shards of at most ``largest`` values."""
    count = owners * max(1, ceil(numel / (largest * owners)))
    edges = [numel * shard // count for shard in range(count + 1)]
    return [(edges[i], edges[i + 1], i % owners) for i in range(count)]


def _by_layer(layers: Sequence[int], owners: int) -> list[tuple[int, int, int]]:
    """Return start, stop and owner of runs of layers with one owner."""
    owned = [0] * owners
    owner = [0] * len(layers)
    for index in sorted(range(len(layers)), key=lambda index: -layers[index]):
        lightest = owned.index(min(owned))
        owner[index] = lightest
        owned[lightest] += layers[index]
    shards: list[tuple[int, int, int]] = []
    stop = 0
    for size, server in zip(layers, owner, strict=True):
        start, stop = stop, stop + size
        if shards and shards[-1][2] == server:
            start = shards.pop()[0]
        shards.append((start, stop, server))
    return shards
