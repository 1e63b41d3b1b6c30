"""A node as one worker with several devices: its workers make one step together.

The first worker of a node is its leader. It takes part in the algorithm as a worker with n times
the batch size, transparently to the algorithm: it distributes its samples among the others, sends
them its model before each step, and adds their gradients to its own, bucket by bucket during
backward, so that the algorithm gets the mean. The node then sends one message instead of several,
and receives one model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from math import log2

import torch
from torch import Tensor

from aladdin_mpi.codec.base import DenseWire
from aladdin_mpi.control.budget import SampleClient, SampleLease, WorkerReport
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.flat.layout import Bucket, Layout
from aladdin_mpi.flat.vectors import add, copy, full, scale
from aladdin_mpi.transport.base import (
    Event,
    Request,
    Transport,
    await_event,
    charge_memory,
    numbers_of,
)
from aladdin_mpi.transport.checksums import is_void

LEASE_NUMBERS = 4
"""Number of values in a message with a sample lease."""
MOVED = 5
"""Bytes moved in memory for each byte from another worker: copied (2) and added (3)."""


def _part(size: int, place: int, places: int) -> int:
    """Return a worker's share of ``size`` samples; the leader's (place 0) is a largest one."""
    return size * (places - place) // places - size * (places - place - 1) // places


def host_groups(transport: Transport, servers: int, largest: int | None = None) -> list[list[int]]:
    """Return the workers' ranks by host; the first rank of each group leads it.

    Args:
        transport: supplies the hosts.
        servers: number of servers, which are the first ranks.
        largest: largest group; a host with more workers has several. None: one group per host.
    """
    hosts: dict[int, list[int]] = {}
    for rank in range(servers, transport.size):
        hosts.setdefault(transport.hosts[rank], []).append(rank)
    return [
        ranks[start : start + (largest or len(ranks))]
        for ranks in hosts.values()
        for start in range(0, len(ranks), largest or len(ranks))
    ]


class NodeSum:
    """Sum of the gradients of a node's other workers and its leader's, bucket by bucket.

    Args:
        others: ranks of the other workers.
        wire: codec of their messages.

    Attributes:
        shares: weights of the gradients in the sum, the leader's first.
    """

    def __init__(
        self, transport: Transport, layout: Layout, others: Sequence[int], wire: DenseWire
    ) -> None:
        self.shares = [1.0] * (1 + len(others))
        self._transport = transport
        self._layout = layout
        self._wire = wire
        self._received = {rank: wire.buffer(layout.numel) for rank in others}
        self._taken: dict[int, Event] = {}
        """Events of a device's reads of the receive buffers, by rank."""

    def begin(self, vector: Tensor) -> None:
        """Start a step, whose gradients are added to ``vector``."""
        for taken in self._taken.values():
            await_event(self._transport, taken)
        self._vector = vector
        self._awaited: deque[tuple[Bucket, list[Request]]] = deque()
        for bucket in self._layout.buckets:
            receives = [
                self._transport.irecv(bucket.of(buffer), rank, Tag.LOCAL_GRADIENT)
                for rank, buffer in self._received.items()
            ]
            self._awaited.append((bucket, receives))

    def complete(self, bucket: Bucket) -> Iterator[Bucket]:
        """Yield the buckets that all workers have completed, after this worker's ``bucket``."""
        is_last = bucket.index == len(self._layout.buckets) - 1
        while self._awaited and self._awaited[0][0].index <= bucket.index:
            first, receives = self._awaited[0]
            if is_last:
                self._transport.wait(*receives)
            elif not all(self._transport.test(receive) for receive in receives):
                return
            self._awaited.popleft()
            self._add(first)
            yield first

    def _add(self, bucket: Bucket) -> None:
        mine = bucket.of(self._vector)
        nbytes = MOVED * mine.numel() * self._wire.dtype.itemsize * len(self._received)
        charge_memory(self._transport, nbytes)
        if mine.is_meta:
            return
        if self.shares[0] != 1.0:
            scale(mine, self.shares[0])
        for (rank, buffer), share in zip(self._received.items(), self.shares[1:], strict=True):
            theirs = bucket.of(buffer)
            if not is_void(theirs):
                values, taken = self._wire.fetch(theirs)
                add(mine, values, alpha=share)
                if taken is not None:
                    self._taken[rank] = taken


class NodeLeader:
    """The first worker of a node, as seen by the others.

    Args:
        transport: transport among all ranks.
        ranks: ranks of the node's workers; the first is this one.
        x: the flat model.
    """

    def __init__(
        self, transport: Transport, layout: Layout, ranks: Sequence[int], x: Tensor
    ) -> None:
        self.size = len(ranks)
        self._transport = transport
        self._layout = layout
        self._others = ranks[1:]
        self._x = x
        self._wire = DenseWire(full(x.dtype), x.device, transport.needs_memory)
        self._model = self._wire.buffer(layout.numel)
        self._sum = NodeSum(transport, layout, self._others, self._wire)
        self._sends: list[Request] = []
        self._has_ended = False

    def open(self) -> None:
        """Start a segment."""
        self._has_ended = False

    def deal(self, lease: SampleLease) -> SampleLease:
        """Distribute the node's samples of a step; return this worker's part."""
        parts = [_part(lease.size, place, self.size) for place in range(self.size)]
        self._sum.shares = [part / lease.size if lease.size else 0.0 for part in parts]
        if not self._has_ended:
            for rank, part in zip(self._others, parts[1:], strict=True):
                numbers = (lease.start, part, lease.whole, log2(lease.scale))
                self._transport.isend(numbers, rank, Tag.NODE_LEASE)
        self._has_ended = self._has_ended or lease.whole == 0
        return lease._replace(size=parts[0])

    def begin(self, vector: Tensor) -> NodeSum:
        """Start a step: send the model to the others; their gradients are added to ``vector``."""
        self._transport.wait(*self._sends)
        self._sends.clear()
        for bucket in self._layout.buckets:
            model = bucket.of(self._model)
            event = self._wire.encode(bucket.of(self._x), model)
            if event is not None:
                event.hold()  # the step may change x at once
            self._sends += [
                self._transport.isend(model, rank, Tag.LOCAL_MODEL, after=event)
                for rank in self._others
            ]
        self._sum.begin(vector)
        return self._sum


class LeaderLink:
    """A worker's link to the leader of its node: sends gradients, receives models.

    Args:
        wire: codec of gradients and models.
        gradient: the flat gradient to send.
        x: the flat model.
        model: receive buffer of models; may be ``x`` itself.
    """

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        leader: int,
        wire: DenseWire,
        gradient: Tensor,
        x: Tensor,
        model: Tensor,
    ) -> None:
        self._transport = transport
        self._layout = layout
        self._leader = leader
        self._wire = wire
        self._gradient = gradient
        self._x = x
        self._model = model
        self._sent = wire.buffer_for(gradient)
        self._sends: list[Request] = []
        self._taken: Event | None = None
        """Event of a device's read of the received model."""

    def send(self, bucket: Bucket) -> None:
        """Send a completed bucket of the gradient."""
        wire = bucket.of(self._sent)
        event = self._wire.encode(bucket.of(self._gradient), wire)
        self._sends.append(
            self._transport.isend(wire, self._leader, Tag.LOCAL_GRADIENT, after=event)
        )

    def flush(self) -> None:
        """Wait until the gradient has been sent."""
        self._transport.wait(*self._sends)
        self._sends.clear()

    def take_model(self) -> None:
        """Wait for the leader's model and copy it."""
        if self._taken is not None:
            await_event(self._transport, self._taken)
        receives = [
            self._transport.irecv(bucket.of(self._model), self._leader, Tag.LOCAL_MODEL)
            for bucket in self._layout.buckets
        ]
        self._transport.wait(*receives)
        if self._model.data_ptr() == self._x.data_ptr():
            return
        for bucket in self._layout.buckets:
            if not is_void(bucket.of(self._model)):
                values, self._taken = self._wire.fetch(bucket.of(self._model))
                with self._transport.atomic():
                    copy(bucket.of(self._x), values)


class LedSampleClient(SampleClient):
    """Sample client of a worker that gets its samples from its leader; it reports to rank 0."""

    def __init__(self, transport: Transport, leader: int) -> None:
        super().__init__(transport)
        self._leader = leader

    @property
    def short(self) -> int:
        """Number of leases to request: one at a time."""
        return 1 - self.outstanding

    def request(self, want: int, report: WorkerReport) -> None:
        """Report, and post the receive of the leader's next lease."""
        numbers = torch.empty(LEASE_NUMBERS, dtype=torch.float64)
        self._grants.append(self._transport.irecv(numbers, self._leader, Tag.NODE_LEASE))
        self._send(0, report)

    def take(self) -> SampleLease:
        """Wait for the leader's next lease and return it."""
        receive = self._grants.popleft()
        self._transport.wait(receive)
        start, size, whole, exponent = numbers_of(receive)
        return SampleLease(int(start), int(size), int(whole), scale=2.0**exponent)
