"""How the flat vector of parameters is cut: into shards for servers, into buckets for the wire."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil

BYTES_PER_MB = 1_000_000
BYTES_PER_VALUE = 4


@dataclass(frozen=True)
class Bucket:
    """One message's worth of the flat vector: ``[start, stop)``, owned by ``server``.

    Buckets are numbered in the order in which backward completes them.
    """

    index: int
    start: int
    stop: int
    server: int

    @property
    def part(self) -> slice:
        """Where the bucket lies in the flat vector."""
        return slice(self.start, self.stop)

    @property
    def numel(self) -> int:
        """Number of values."""
        return self.stop - self.start


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
        """The buckets of one server, in order."""
        return tuple(bucket for bucket in self.buckets if bucket.server == server)


def cut(numel: int, servers: int, bucket_mb: float, shard_mb: float) -> Layout:
    """Memory-wise sharding (Ko et al., CIKM 2021, section 5.1).

    The vector is cut into equal shards of at most ``shard_mb`` (fp32), whatever the
    layers' boundaries, and dealt to the servers in turn, as many to each; a shard
    is cut into equal buckets of at most ``bucket_mb``, the messages on the wire.
    Dealing in turn keeps all servers' links busy throughout backward.

    Args:
        numel: length of the flat vector.
        servers: number of servers; 0 (no server) cuts as for one.
        bucket_mb: largest message in MB (10^6 bytes).
        shard_mb: largest shard in MB.
    """
    owners = max(servers, 1)
    shard_values = max(1, int(shard_mb * BYTES_PER_MB) // BYTES_PER_VALUE)
    bucket_values = max(1, int(bucket_mb * BYTES_PER_MB) // BYTES_PER_VALUE)
    shards = owners * max(1, ceil(numel / (shard_values * owners)))
    buckets: list[Bucket] = []
    for shard in range(shards):
        first, last = numel * shard // shards, numel * (shard + 1) // shards
        pieces = ceil((last - first) / bucket_values)
        for piece in range(pieces):
            start = first + (last - first) * piece // pieces
            stop = first + (last - first) * (piece + 1) // pieces
            buckets.append(Bucket(len(buckets), start, stop, shard % owners))
    return Layout(numel, servers, tuple(buckets))
