"""An island: several ranks that are one worker of the algorithm, and make each step together.

Every member computes the gradient of its share of the island's samples. The model is divided into
lanes (:mod:`aladdin_mpi.flat.lanes`), and one member takes part in the algorithm on each. If every
member has the whole model, the lane's owner adds up the gradients of all members there, bucket by
bucket during backward, so that the algorithm gets the mean, and sends its values to the others
before the next step; if the model has fewer lanes than the island members, the others only compute.
If FSDP has divided the parameters among the members, it does all that.

The first member requests the island's samples. To the algorithm an island is a worker whose batch
is larger; each lane's messages leave through another rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from math import inf, sqrt

import torch
from torch import Tensor

from aladdin_mpi.codec.base import DenseWire
from aladdin_mpi.control.budget import LEASE_NUMBERS, SampleClient, SampleLease, WorkerReport
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.flat.lanes import PieceLane
from aladdin_mpi.flat.layout import Bucket, Layout
from aladdin_mpi.flat.replica import PhantomReplica, Replica
from aladdin_mpi.flat.unused import UnusedMarks
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

MOVED = 5
"""Bytes moved in memory for each byte from another worker: copied (2) and added (3)."""


def share(size: int, place: int, places: int) -> int:
    """Return a member's share of ``size`` samples; the first member's is a largest one."""
    return size * (places - place) // places - size * (places - place - 1) // places


def host_groups(
    hosts_of: Sequence[int], servers: int, largest: int | None = None
) -> list[list[int]]:
    """Return the workers' ranks by host; the first rank of each group leads it.

    Args:
        hosts_of: the host of each rank.
        servers: number of servers, which are the first ranks.
        largest: largest group; a host with more workers has several. None: one group per host.
    """
    hosts: dict[int, list[int]] = {}
    for rank in range(servers, len(hosts_of)):
        hosts.setdefault(hosts_of[rank], []).append(rank)
    return [
        ranks[start : start + (largest or len(ranks))]
        for ranks in hosts.values()
        for start in range(0, len(ranks), largest or len(ranks))
    ]


class LaneSum:
    """Sum of the gradients of other ranks and this one, bucket by bucket.

    Args:
        layout: of the lane.
        others: the other ranks.
        wire: codec of their messages.

    Attributes:
        shares: weights of the gradients in the sum, this rank's first.
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


class LaneOwner:
    """The owner of a lane, as seen by the other members of its island.

    Args:
        transport: transport among all ranks.
        lane: the lane.
        others: ranks of the other members.
        x: the lane's model.
    """

    def __init__(
        self,
        transport: Transport,
        lane: PieceLane,
        others: Sequence[int],
        x: Tensor,
        wire: DenseWire,
    ) -> None:
        self.lane = lane
        self.sum = LaneSum(transport, lane.layout, others, wire)
        self._transport = transport
        self._others = others
        self._x = x
        self._wire = wire
        self._model = wire.buffer(lane.layout.numel)
        self._sends: list[Request] = []

    def send_model(self) -> None:
        """Send the lane's model to the other members."""
        self.flush()
        for bucket in self.lane.layout.buckets:
            model = bucket.of(self._model)
            event = self._wire.encode(bucket.of(self._x), model)
            if event is not None:
                event.hold()  # the step may change x at once
            self._sends += [
                self._transport.isend(model, rank, Tag.LOCAL_MODEL, after=event)
                for rank in self._others
            ]

    def flush(self) -> None:
        """Wait until the model has been sent."""
        self._transport.wait(*self._sends)
        self._sends.clear()


class OwnerLink:
    """A link to the owner of a lane: sends gradients, receives models.

    Args:
        pieces: the lane's buckets, as parts of whole vectors.
        owner: rank of the owner.
        wire: codec of gradients and models.
        gradient: the whole gradient, of which the lane's pieces are sent.
        sent: send buffer of gradients; may be ``gradient`` itself.
        x: the whole model.
        model: receive buffer of models; may be ``x`` itself.
    """

    def __init__(
        self,
        transport: Transport,
        pieces: Layout,
        owner: int,
        wire: DenseWire,
        gradient: Tensor,
        sent: Tensor,
        x: Tensor,
        model: Tensor,
    ) -> None:
        self._transport = transport
        self._pieces = pieces
        self._owner = owner
        self._wire = wire
        self._gradient = gradient
        self._x = x
        self._model = model
        self._sent = sent
        self._sends: list[Request] = []
        self._taken: Event | None = None
        """Event of a device's read of the received model."""

    def send(self, number: int) -> None:
        """Send the lane's piece of a completed bucket of the gradient."""
        bucket = self._pieces.buckets[number]
        wire = bucket.of(self._sent)
        event = self._wire.encode(bucket.of(self._gradient), wire)
        self._sends.append(
            self._transport.isend(wire, self._owner, Tag.LOCAL_GRADIENT, after=event)
        )

    def flush(self) -> None:
        """Wait until the gradient has been sent."""
        self._transport.wait(*self._sends)
        self._sends.clear()

    def take_model(self) -> None:
        """Wait for the owner's model and copy it."""
        if self._taken is not None:
            await_event(self._transport, self._taken)
        receives = [
            self._transport.irecv(bucket.of(self._model), self._owner, Tag.LOCAL_MODEL)
            for bucket in self._pieces.buckets
        ]
        self._transport.wait(*receives)
        if self._model.data_ptr() == self._x.data_ptr():
            return
        for bucket in self._pieces.buckets:
            if not is_void(bucket.of(self._model)):
                values, self._taken = self._wire.fetch(bucket.of(self._model))
                with self._transport.atomic():
                    copy(bucket.of(self._x), values)


class Island:
    """The island of this rank, whose members have a part of each parameter.

    FSDP moves gradients and parameters among them. The members take the same steps: each computes
    an equal part of the island's samples, and they clip gradients together.

    Args:
        transport: transport among all ranks.
        ranks: the members; the first ``owners`` own a lane each.
        whole: this rank's replica of the whole model.
        layout: of the vector in which ``whole`` has its gradient.
        leaders: the first members of all islands.
    """

    def __init__(
        self,
        transport: Transport,
        ranks: Sequence[int],
        owners: int,
        whole: Replica | PhantomReplica,
        layout: Layout,
        leaders: Sequence[int],
    ) -> None:
        self.size = len(ranks)
        first = layout.servers
        self._workers = {rank: first + number for number, rank in enumerate(leaders)}
        """Rank of each island's worker among those that train a lane, by its first member."""
        self.whole = whole
        self.layout = layout
        self._transport = transport
        self._ranks = ranks
        self._place = ranks.index(transport.rank)
        self._owners = ranks[:owners]
        self._has_ended = False

    @property
    def is_first(self) -> bool:
        """Whether this rank requests the island's samples."""
        return self._place == 0

    # -- samples --------------------------------------------------------------------------
    def open(self) -> None:
        """Start a segment."""
        self._has_ended = False

    def divide(self, lease: SampleLease) -> SampleLease:
        """Return this member's part of the island's lease, which the first one sends to all.

        Its ranks are those of a lane.
        """
        if self.is_first and not self._has_ended:
            for rank in self._ranks[1:]:
                self._transport.isend(lease.pack(), rank, Tag.ISLAND_LEASE)
        self._has_ended = self._has_ended or lease.whole == 0
        absent = tuple(self._workers[rank] for rank in lease.absent)
        return lease._replace(size=share(lease.size, self._place, self.size), absent=absent)

    # -- models and gradients ----------------------------------------------------------------
    def begin(self, vector: Tensor) -> Tensor:
        """Start a step whose gradient is ``vector``, the lane's; return the one to compute."""
        return vector

    def exchange_models(self) -> None:
        """Update the whole model from those of all lanes; every member calls it."""

    def flush(self) -> None:
        """Wait until all messages have been sent."""

    # -- clipping ------------------------------------------------------------------------------
    def smallest(self, norm: float | None) -> float | None:
        """Return the smallest of the norms to which members clip this step; None: none does.

        Every member calls this in every step that its loop may clip. Members without a batch may
        not know the norm.
        """
        known = self._gather(inf if norm is None else norm, self._ranks)
        return None if min(known) == inf else min(known)

    def clip_norm(self, vector: Tensor, largest: float) -> None:
        """Scale the lane's vector by the same factor as those of all other lanes, in place.

        The factor limits the L2 norm of all lanes together; their owners call this together.
        """
        if vector.is_meta or self._transport.rank not in self._owners:
            return
        squares = torch.linalg.vector_norm(vector, dtype=torch.float64).square().item()
        norm = sqrt(sum(self._gather(squares, self._owners)))
        scale(vector, min(1.0, largest / (norm + 1e-6)))

    def _gather(self, number: float, ranks: Sequence[int]) -> list[float]:
        """Return the numbers of these members, which call it together, in one order for all."""
        others = [rank for rank in ranks if rank != self._transport.rank]
        received = [torch.empty(1, dtype=torch.float64) for _ in others]
        receives = [
            self._transport.irecv(buffer, rank, Tag.LOCAL_NORM)
            for buffer, rank in zip(received, others, strict=True)
        ]
        sends = [self._transport.isend((number,), rank, Tag.LOCAL_NORM) for rank in others]
        self._transport.wait(*receives, *sends)
        known = {rank: numbers_of(each)[0] for rank, each in zip(others, receives, strict=True)}
        known[self._transport.rank] = number
        return [known[rank] for rank in ranks]


class ReplicatedIsland(Island):
    """An island whose members have the whole model, and send each other gradients and values.

    Args:
        transport: transport among all ranks.
        ranks: the members; the first ones own a lane each.
        lanes: all lanes of the model.
        whole: this rank's replica of the whole model.
        x: the model of the lane that this rank owns; ``whole.parameters`` if there is one lane.
        marks: whether other ranks have to know the parameters that a gradient does not reach.
        leaders: the first members of all islands.
    """

    def __init__(
        self,
        transport: Transport,
        ranks: Sequence[int],
        lanes: Sequence[PieceLane],
        whole: Replica | PhantomReplica,
        x: Tensor,
        marks: bool,
        leaders: Sequence[int],
    ) -> None:
        super().__init__(transport, ranks, len(lanes), whole, lanes[0].whole, leaders)
        place = self._place
        self._lanes = lanes
        self._x = x
        wire = DenseWire(full(x.dtype), whole.parameters.device, transport.needs_memory)
        self._own: LaneOwner | None = None
        if place < len(lanes):
            others = [rank for rank in ranks if rank != transport.rank]
            self._own = LaneOwner(transport, lanes[place], others, x, wire)
        self._has_all = self._own is not None and len(lanes) == 1
        self._gradient = self._x if self._has_all else whole.new_vector()
        others_lanes = [lane for lane in lanes if lane.number != place]
        model = wire.buffer_for(whole.parameters) if others_lanes else self._x
        sent = wire.buffer_for(self._gradient) if others_lanes else self._x
        self._links = [
            OwnerLink(
                transport,
                lane.pieces,
                ranks[lane.number],
                wire,
                self._gradient,
                sent,
                whole.parameters,
                model,
            )
            for lane in others_lanes
        ]
        self._marks = [UnusedMarks(whole.sizes, lane.pieces) for lane in lanes] if marks else []

    def divide(self, lease: SampleLease) -> SampleLease:
        """Return this member's part of the island's lease, which the first one sends to all."""
        if self._own is not None:
            parts = [share(lease.size, place, self.size) for place in range(self.size)]
            shares = [part / lease.size if lease.size else 0.0 for part in parts]
            mine = shares.pop(self._place)
            self._own.sum.shares = [mine, *shares]
        return super().divide(lease)

    def begin(self, vector: Tensor) -> Tensor:
        """Start a step whose gradient is added to ``vector``, the lane's; exchange models.

        Returns the whole gradient to compute; ``vector`` itself if there is one lane, on its owner.
        """
        self.exchange_models()
        if self._own is not None:
            self._own.sum.begin(vector)
        self._vector = vector
        return vector if self._has_all else self._gradient

    def exchange_models(self) -> None:
        """Update the whole model from those of all lanes; every member calls it."""
        if self._own is not None:
            self._own.send_model()
            if not self._has_all:
                self._own.lane.scatter(self._x, self.whole.parameters)
        for link in self._links:
            link.flush()
            link.take_model()

    def mark(self, bucket: Bucket, unused: Collection[int]) -> None:
        """Mark the parameters in a bucket that the gradient does not reach."""
        gradient = self._vector if self._has_all else self._gradient
        for marks, lane in zip(self._marks, self._lanes, strict=False):
            piece = lane.pieces.buckets[bucket.index]
            marks.write(piece, piece.of(gradient), unused)

    def add(self, bucket: Bucket) -> Iterator[Bucket]:
        """Add a completed bucket to the sums; yield those of the own lane that are complete."""
        for link in self._links:
            link.send(bucket.index)
        if self._own is None:
            return
        lane = self._own.lane
        mine = lane.layout.buckets[bucket.index]
        if not self._has_all:
            copy(mine.of(self._vector), lane.pieces.buckets[bucket.index].of(self._gradient))
        yield from self._own.sum.complete(mine)

    def flush(self) -> None:
        """Wait until all messages have been sent."""
        if self._own is not None:
            self._own.flush()
        for link in self._links:
            link.flush()


class IslandSampleClient(SampleClient):
    """Sample client of a member that gets its island's leases from the first member.

    It reports to rank 0.
    """

    def __init__(self, transport: Transport, first: int, unit: int = 1) -> None:
        super().__init__(transport, unit)
        self._first = first

    @property
    def short(self) -> int:
        """Number of leases to request: one at a time."""
        return 1 - self.outstanding

    def request(self, want: int, report: WorkerReport) -> None:
        """Report, and post the receive of the first member's next lease."""
        most = LEASE_NUMBERS + self._transport.size
        numbers = torch.empty(most, dtype=torch.float64)
        self._grants.append(self._transport.irecv(numbers, self._first, Tag.ISLAND_LEASE))
        self._send(0, report)

    def take(self) -> SampleLease:
        """Wait for the first member's next lease and return it."""
        receive = self._grants.popleft()
        self._transport.wait(receive)
        return self._lease(receive)
