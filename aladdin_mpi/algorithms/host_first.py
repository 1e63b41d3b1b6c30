"""Links of workers that add up their gradients on their host: one of them talks to the servers."""

from __future__ import annotations

from collections import deque

from torch import Tensor

from aladdin_mpi.compression.codec import GradientCodec
from aladdin_mpi.control.budget import Ticket
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.model.layout import Bucket
from aladdin_mpi.model.vectors import copy
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.parameter_server.intake import TAKEN
from aladdin_mpi.parameter_server.server_link import GradientLink
from aladdin_mpi.roles.worker import Worker
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.request import Event, Request
from aladdin_mpi.transport.sealed import SealedTransport, is_void


def host_groups(transport: Transport, servers: int, largest: int | None = None) -> list[list[int]]:
    """The workers' ranks, host by host; the first of each leads the others.

    Args:
        transport: knows the hosts.
        servers: their number; they are the first ranks.
        largest: workers of a group; a host with more has several. None: all of a host.
    """
    hosts: dict[int, list[int]] = {}
    for rank in range(servers, transport.size):
        hosts.setdefault(transport.hosts[rank], []).append(rank)
    return [
        ranks[start : start + (largest or len(ranks))]
        for ranks in hosts.values()
        for start in range(0, len(ranks), largest or len(ranks))
    ]


class LeadingLink(GradientLink):
    """Adds its host's gradients to its own, talks to the servers, and hands on the model."""

    def __init__(
        self,
        worker: Worker,
        optimizer: Optimizer,
        wire: GradientCodec,
        momentum: bool,
        group: list[int],
    ) -> None:
        super().__init__(worker, optimizer, wire, momentum)
        self.transport = worker.transport
        self.layout = worker.layout
        self.wire = wire.plain
        self.group = group
        self.model = wire.buffer_for(self.x)
        self.received = {rank: wire.buffer(self.layout.numel) for rank in group[1:]}
        self.awaited: deque[tuple[Bucket, list[Request]]] = deque()
        self.completed = 0

    def gradients_in(self, batch: Ticket) -> int:
        """Workers of this host that have samples in the round."""
        first = self.layout.servers
        return sum(batch.size_of(rank - first, self.worker.count) > 0 for rank in self.group)

    def push(self, batch: Ticket) -> Tensor:
        """Compute, and send each bucket of the host's sum as it is completed."""
        self.completed = 0
        for bucket in self.layout.buckets:
            receives = [
                self.transport.irecv(bucket.of(buffer), rank, Tag.LOCAL_GRADIENT)
                for rank, buffer in self.received.items()
            ]
            self.awaited.append((bucket, receives))
        return super().push(batch)

    def forward(self, g: Tensor, bucket: Bucket) -> None:
        """Send the host's sum of every bucket that has come from all, without waiting."""
        self.completed = bucket.index + 1
        last = self.completed == len(self.layout.buckets)
        while self.awaited and self.awaited[0][0].index < self.completed:
            bucket, receives = self.awaited[0]
            if last:
                self.transport.wait_all(receives)
            elif not all(self.transport.test(receive) for receive in receives):
                break
            self.awaited.popleft()
            self._add(g, bucket)
            self.outbox.put(bucket)

    def _add(self, g: Tensor, bucket: Bucket) -> None:
        mine = bucket.of(g)
        self.transport.charge_memory(
            TAKEN * mine.numel() * self.wire.dtype.itemsize * len(self.received)
        )
        if not mine.is_meta:
            for buffer in self.received.values():
                theirs = bucket.of(buffer)
                if not is_void(theirs):
                    # It is received into again after the answer to the sum, which left after this.
                    there, _ = self.wire.fetch(theirs)
                    mine.add_(there)

    def pull(self) -> None:
        """Wait for the model and hand it on."""
        super().pull()
        event = self.wire.encode(self.x, self.model)
        self.transport.wait_all(
            [
                self.transport.isend(bucket.of(self.model), rank, Tag.LOCAL_MODEL, after=event)
                for bucket in self.layout.buckets
                for rank in self.group[1:]
            ]
        )


class FollowingLink(GradientLink):
    """Sends its gradients to the leader of its host and gets the model from it."""

    def __init__(
        self,
        worker: Worker,
        optimizer: Optimizer,
        wire: GradientCodec,
        momentum: bool,
        group: list[int],
    ) -> None:
        super().__init__(worker, optimizer, wire, momentum)
        self.transport = worker.transport
        self.layout = worker.layout
        self.wire = wire.plain
        self.leader = group[0]
        self.sends_settings = False  # the leader does
        self.g = worker.replica.new_vector()
        self.sent = wire.buffer_for(self.g)
        # Straight into x, unless it may arrive damaged.
        checked = isinstance(self.transport, SealedTransport)
        self.model = wire.buffer(self.layout.numel) if checked else wire.buffer_for(self.x)
        self.requests: list[Request] = []
        self.taken: Event | None = None
        """A device reads the model until then."""

    def push(self, batch: Ticket) -> Tensor:
        """Compute, and send each bucket to the leader as it is completed."""
        self.transport.wait_all(self.requests)
        self.requests.clear()
        self.worker.gradient(self.g, self._send(self.g))
        return self.g

    def forward(self, g: Tensor, bucket: Bucket) -> None:
        """Send it to the leader."""
        wire = bucket.of(self.sent)
        event = self.wire.encode(bucket.of(g), wire)
        self.requests.append(
            self.transport.isend(wire, self.leader, Tag.LOCAL_GRADIENT, after=event)
        )

    def pull(self) -> None:
        """Wait for the model from the leader."""
        if self.taken is not None:
            self.transport.await_event(self.taken)
        receives = [
            self.transport.irecv(bucket.of(self.model), self.leader, Tag.LOCAL_MODEL)
            for bucket in self.layout.buckets
        ]
        self.transport.wait_all(receives)
        if self.model.data_ptr() != self.x.data_ptr():
            for bucket in self.layout.buckets:
                if not is_void(bucket.of(self.model)):
                    there, self.taken = self.wire.fetch(bucket.of(self.model))
                    copy(bucket.of(self.x), there)
