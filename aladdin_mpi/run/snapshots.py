"""Copies of the global model, taken beside training, never inside it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from aladdin_mpi.control.tags import Tag
from aladdin_mpi.model.layout import Bucket, Layout
from aladdin_mpi.model.projection import Projections
from aladdin_mpi.roles.role import Role
from aladdin_mpi.transport.base import Transport

FRAME_BYTES = 16
"""Before the values of a bucket: its number and their weight."""


class Snapshots:
    """Copies of the global model, collected at rank 0 while training goes on.

    Whoever holds a part of it answers a request as soon as it arrives, from the handler
    of its message: its own work is not interrupted. In virtual time that takes no room
    on the network.

    Args:
        role: this rank's.
        holders: the ranks whose weighted mean is the model's bucket.
        dtype: of the copies.
        projections: applied to a copy, which may be a mean of several models.
    """

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        role: Role,
        holders: Callable[[Bucket], range],
        dtype: torch.dtype,
        projections: Projections,
    ) -> None:
        self._dtype = dtype
        self._projections = projections
        self._transport = transport
        self._layout = layout
        self._role = role
        self._holders = {bucket: holders(bucket) for bucket in layout.buckets}
        self._done: Callable[[Tensor], None] = _nobody
        self._vector = torch.empty(0)
        self._weights: list[float] = []
        self._missing: set[tuple[int, int]] = set()
        transport.on_failure(self._lose)
        transport.exclude_from_traffic(Tag.SNAPSHOT, Tag.SHARD)
        self._others = {rank for ranks in self._holders.values() for rank in ranks} - {0}
        if self._others:
            transport.on_message(Tag.SNAPSHOT, 1, self._answer)
            if transport.rank == 0:
                most = FRAME_BYTES + dtype.itemsize * layout.largest
                transport.on_message(Tag.SHARD, most, self._collect)

    @property
    def busy(self) -> bool:
        """Whether a copy is being collected."""
        return bool(self._missing)

    def take(self, done: Callable[[Tensor], None]) -> None:
        """At rank 0: start to collect a copy; ``done`` is called with it (flat, on the CPU)."""
        self._done = done
        self._vector = torch.zeros(self._layout.numel, dtype=self._dtype)
        self._weights = [0.0] * len(self._layout.buckets)
        failed = self._transport.failed
        self._missing = {
            (rank, bucket.index)
            for bucket, ranks in self._holders.items()
            for rank in ranks
            if rank not in failed
        }
        for rank in sorted(self._others - failed):
            self._transport.isend(torch.zeros(1, dtype=torch.uint8), rank, Tag.SNAPSHOT)
        self._role.when_whole(self._add_mine)

    def _add_mine(self) -> None:
        for bucket in self._mine():
            self._add(0, bucket, self._role.weight(bucket), self._role.part(bucket))

    def _lose(self, rank: int) -> None:
        """Without the part of a rank that has failed the copy may be complete."""
        lost = {key for key in self._missing if key[0] == rank}
        if lost:
            self._missing -= lost
            self._finish()

    def _mine(self) -> list[Bucket]:
        rank = self._transport.rank
        return [bucket for bucket, ranks in self._holders.items() if rank in ranks]

    def _answer(self, source: int, message: Tensor) -> None:
        for bucket in self._mine():
            weight = self._role.weight(bucket)
            head = torch.tensor([bucket.index, weight], dtype=torch.float64)
            values = self._role.part(bucket).detach().to("cpu", self._dtype)
            frame = torch.cat([head.view(torch.uint8), values.view(torch.uint8)])
            self._transport.isend(frame, source, Tag.SHARD)

    def _collect(self, source: int, message: Tensor) -> None:
        index, weight = message[:FRAME_BYTES].clone().view(torch.float64).tolist()
        values = message[FRAME_BYTES:].clone().view(self._dtype)
        self._add(source, self._layout.buckets[int(index)], weight, values)

    def _add(self, source: int, bucket: Bucket, weight: float, values: Tensor) -> None:
        mine = self._vector[bucket.part]
        if len(self._holders[bucket]) == 1:
            mine.copy_(values)
        elif weight:
            # The running mean: exact when all are the same.
            self._weights[bucket.index] += weight
            mine.lerp_(values.to(mine.device, mine.dtype), weight / self._weights[bucket.index])
        self._missing.discard((source, bucket.index))
        self._finish()

    def _finish(self) -> None:
        if not self._missing:
            self._projections.apply(self._vector)
            self._done(self._vector)


def _nobody(vector: Tensor) -> None:
    """No copy has been asked for."""
