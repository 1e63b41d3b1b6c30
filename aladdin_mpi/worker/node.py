"""A node as one worker with several devices: its workers make one step together.

The first worker of a node leads. It takes part in the algorithm as a worker of n times the batch,
and no algorithm has to know: it deals its samples to the others, gives them its model before each
step, and adds their gradients to its own, bucket by bucket while backward runs, so that the
algorithm sees the mean. One message then leaves the node where there would be several, and one
model comes to it.
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

TICKET = 4
"""Numbers of a message that deals samples."""
MOVED = 5
"""Bytes that move in memory for each that comes from another worker: copied in (2), added (3)."""


def _part(size: int, place: int, places: int) -> int:
    """Of so many samples: the first place, the leader's, has as many as any."""
    return size * (places - place) // places - size * (places - place - 1) // places


def host_groups(transport: Transport, servers: int, largest: int | None = None) -> list[list[int]]:
    """Return the workers' ranks, host by host; the first of each leads the others.

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


class NodeSum:
    """Adds the gradients of a node's other workers to its leader's, bucket by bucket.

    Args:
        others: ranks of the other workers.
        wire: of what they send.

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
        """A device reads what has been received from a rank until then."""

    def begin(self, vector: Tensor) -> None:
        """Begin a step, whose gradients are added to ``vector``."""
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
        """Yield the buckets of which every worker's gradient is there, now that this one's is."""
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
                there, taken = self._wire.fetch(theirs)
                add(mine, there, alpha=share)
                if taken is not None:
                    self._taken[rank] = taken


class NodeLeader:
    """What the first worker of a node does for the others.

    Args:
        transport: among all ranks.
        ranks: of the node's workers; the first is this one.
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
        """Begin a segment."""
        self._has_ended = False

    def deal(self, lease: SampleLease) -> SampleLease:
        """Deal the node's samples of a step; returns this worker's part."""
        parts = [_part(lease.size, place, self.size) for place in range(self.size)]
        self._sum.shares = [part / lease.size if lease.size else 0.0 for part in parts]
        if not self._has_ended:
            for rank, part in zip(self._others, parts[1:], strict=True):
                numbers = (lease.start, part, lease.whole, log2(lease.scale))
                self._transport.isend(numbers, rank, Tag.NODE_TICKET)
        self._has_ended = self._has_ended or lease.whole == 0
        return lease._replace(size=parts[0])

    def begin(self, vector: Tensor) -> NodeSum:
        """Begin a step: send the others the model; their gradients are added to ``vector``."""
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
    """A worker's link to the leader of its node: its gradients out, models in.

    Args:
        wire: of gradients and models.
        gradient: the flat gradient that is sent.
        x: the flat model.
        model: what models are received into; may be ``x`` itself.
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
        """A device reads the model until then."""

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
        """Wait for the leader's model and take it."""
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
                there, self._taken = self._wire.fetch(bucket.of(self._model))
                with self._transport.atomic():
                    copy(bucket.of(self._x), there)


class LedSampleClient(SampleClient):
    """The samples of a worker that a leader deals to; its reports go to rank 0 as any worker's."""

    def __init__(self, transport: Transport, leader: int) -> None:
        super().__init__(transport)
        self._leader = leader

    @property
    def short(self) -> int:
        """One is asked for at a time."""
        return 1 - self.outstanding

    def request(self, want: int, report: WorkerReport) -> None:
        """Report, and await what the leader deals."""
        numbers = torch.empty(TICKET, dtype=torch.float64)
        self._grants.append(self._transport.irecv(numbers, self._leader, Tag.NODE_TICKET))
        self._send(0, report)

    def take(self) -> SampleLease:
        """The leader's next; waits for it."""
        receive = self._grants.popleft()
        self._transport.wait(receive)
        start, size, whole, exponent = numbers_of(receive)
        return SampleLease(int(start), int(size), int(whole), scale=2.0**exponent)
