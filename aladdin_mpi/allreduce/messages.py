"""All-reduces by a transport's own collectives and messages."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from aladdin_mpi.allreduce.base import AllReduce, Buffers, PendingSum
from aladdin_mpi.allreduce.compressed import InOrder, Queued
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.errors import PeerFailedError
from aladdin_mpi.transport import collectives
from aladdin_mpi.transport.base import Event, Request, Transport, await_event
from aladdin_mpi.transport.group import Stepper


class SingleAllReduce(AllReduce):
    """Sums in ``dtype`` by the transport's own all-reduce, over MPI into memory of its own."""

    name = "mpi"

    def __init__(self, transport: Transport, device: torch.device, dtype: torch.dtype) -> None:
        self._transport = transport
        self._moves_bytes = transport.needs_memory
        self._buffers = Buffers(dtype, device, self._moves_bytes)
        self._order = InOrder(transport, most=None)

    def start(self, values: Tensor, key: int) -> PendingSum:
        """See :meth:`AllReduce.start`."""
        buffer, event = self._buffers.load(values, key)
        total = self._buffers.total(buffer, key) if self._moves_bytes else None
        queued = self._order.put(lambda: self._transport.iallreduce(buffer, total), event)
        return _Single(self, values, buffer, total, queued)

    def finish(self, pending: _Single) -> Tensor:
        """Wait for one sum; on the CPU it stays where it is."""
        self._order.wait(pending.queued)
        total = pending.buffer if pending.total is None else pending.total
        if pending.buffer is pending.values:
            return total
        Buffers.store(total, pending.values)
        return pending.values

    def describe(self) -> str:
        """See :meth:`AllReduce.describe`."""
        return describe(self._transport, f"all-reduce in {self._buffers.name}")


class _Single(PendingSum):
    """``total`` is where the sum comes; None: into ``buffer``."""

    def __init__(
        self,
        owner: SingleAllReduce,
        values: Tensor,
        buffer: Tensor,
        total: Tensor | None,
        queued: Queued,
    ) -> None:
        self.owner = owner
        self.values = values
        self.buffer = buffer
        self.total = total
        self.queued = queued

    def wait(self) -> Tensor:
        return self.owner.finish(self)


class DirectAllReduce(AllReduce):
    """Sums the wire's values in fp32: a reduce-scatter and an all-gather, each in one round.

    Every rank gets the same bits: the sum of everyone's rounded values, rounded once more.

    Args:
        tags: of the messages of the two rounds.
    """

    name = "mpi"

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        wire_dtype: torch.dtype,
        tags: tuple[int, int] = (Tag.REDUCE_SCATTER, Tag.ALL_GATHER),
    ) -> None:
        self._transport = transport
        self._scatter, self._gather = tags
        self._buffers = Buffers(wire_dtype, device, transport.needs_memory)
        self._spaces: dict[int, _Space] = {}
        self._scattering: deque[_DirectSum] = deque()
        self._under_way: list[_DirectSum] = []
        self._dead: int | None = None

    def start(self, values: Tensor, key: int) -> PendingSum:
        """See :meth:`AllReduce.start`."""
        self._check()
        self._advance()
        buffer, event = self._buffers.load(values, key)
        space = self._spaces.get(key)
        if space is None or space.gathered.numel() != values.numel():
            gathered = self._buffers.like(buffer)
            space = self._spaces[key] = _Space(self._transport, buffer, gathered)
        pending = _DirectSum(self, values, buffer, event, space)
        self._under_way.append(pending)
        self._exchange(pending)
        self._scattering.append(pending)
        self._check()
        return pending

    def _exchange(self, pending: _DirectSum) -> None:
        """Send everyone's part to its owner; post the receives."""
        transport, space = self._transport, pending.space
        for peer in space.peers:
            own = space.received[peer]
            if own.numel():
                pending.own.append(transport.irecv(own, peer, self._scatter))
        if pending.event is None:
            self._await_sums(pending)
        for peer in space.peers:
            if space.size(peer):
                piece = pending.buffer[space.parts[peer]]
                send = transport.isend(piece, peer, self._scatter, after=pending.event)
                pending.others.append(send)

    def _await_sums(self, pending: _DirectSum) -> None:
        """Post the receives of the second half.

        The last sums may still be on their way from there to the device. They are no more when the
        event has happened, before which the device had to take them in.
        """
        space = pending.space
        for peer in space.peers:
            if space.size(peer):
                gathered = space.gathered[space.parts[peer]]
                pending.others.append(self._transport.irecv(gathered, peer, self._gather))

    def _advance(self) -> None:
        """Send the sums, in order, of which every rank's share has come."""
        while self._scattering and self._ready(self._scattering[0]):
            self._reduce(self._scattering.popleft())

    def _ready(self, pending: _DirectSum) -> bool:
        return _happened(pending.event) and all(map(self._transport.test, pending.own))

    def _reduce(self, pending: _DirectSum) -> None:
        """Add this rank's part and send the sum to everyone."""
        transport, space = self._transport, pending.space
        if pending.event is not None:
            self._await_sums(pending)
        total = space.gathered[space.parts[transport.rank]]
        space.add(pending.buffer, total)
        if total.numel():
            for peer in space.peers:
                pending.others.append(transport.isend(total, peer, self._gather))
        pending.reduced = True

    def finish(self, pending: _DirectSum) -> None:
        """Wait for one sum; the second half of those before it has to begin first."""
        while not pending.reduced:
            first = self._scattering[0]
            if first.event is not None:
                await_event(self._transport, first.event)
            self._transport.wait(*first.own)
            self._check()
            self._advance()
        self._transport.wait(*pending.others)
        self._check()
        self._under_way.remove(pending)
        Buffers.store(pending.space.gathered, pending.values)
        self._advance()

    def abandon(self, dead: int) -> None:
        """See :meth:`AllReduce.abandon`."""
        self._dead = dead
        for pending in list(self._under_way):
            for request in (*pending.own, *pending.others):
                self._transport.abandon(request)

    def _check(self) -> None:
        """Raise PeerFailedError behind a death; what has been sent since is abandoned too."""
        if self._dead is not None:
            self.abandon(self._dead)
            raise PeerFailedError(self._dead, "")

    def describe(self) -> str:
        """See :meth:`AllReduce.describe`."""
        return describe(self._transport, f"messages in {self._buffers.name}, added in float32")


class _DirectSum(PendingSum):
    """``own`` are the receives of the first half, ``others`` all that has to end besides."""

    def __init__(
        self,
        owner: DirectAllReduce,
        values: Tensor,
        buffer: Tensor,
        event: Event | None,
        space: _Space,
    ) -> None:
        self.owner = owner
        self.values = values
        self.buffer = buffer
        self.event = event
        self.space = space
        self.own: list[Request] = []
        self.others: list[Request] = []
        self.reduced = False

    def wait(self) -> Tensor:
        self.owner.finish(self)
        return self.values


class _Space:
    """How a bucket is dealt to the ranks, and the memory that its messages come into.

    ``peers`` are the other ranks, the next one first, so that all do not send to one at
    once. ``parts[i]`` is rank i's part, ``received[i]`` what rank i sends of this rank's.
    """

    def __init__(self, transport: Transport, buffer: Tensor, gathered: Tensor) -> None:
        rank, ranks, numel = transport.rank, transport.size, buffer.numel()
        self.rank = rank
        self.peers = [(rank + step) % ranks for step in range(1, ranks)]
        bounds = [numel * i // ranks for i in range(ranks + 1)]
        self.parts = [slice(bounds[i], bounds[i + 1]) for i in range(ranks)]
        self.gathered = gathered
        own = buffer[self.parts[rank]]
        self.received = {peer: torch.zeros_like(own) for peer in self.peers}

    def size(self, rank: int) -> int:
        """Values in the part of ``rank``."""
        return self.parts[rank].stop - self.parts[rank].start

    def add(self, buffer: Tensor, total: Tensor) -> None:
        """Put the sum of this rank's part into ``total``; in rank order, so as to be repeatable."""
        if total.is_meta:
            return
        own = buffer[self.parts[self.rank]]
        pieces = {**self.received, self.rank: own}
        sums = torch.full((total.numel(),), -0.0)  # 0.0 would erase the sign of -0.0 in all pieces
        for rank in sorted(pieces):
            sums += pieces[rank]
        total.copy_(sums)


def _happened(event: Event | None) -> bool:
    return event is None or event.query()


def describe(transport: Transport, how: str) -> str:
    """What adds up, and over which network."""
    return f"{'virtual network' if transport.models_time else 'MPI'}: {how}"


FIRST_TAG = 10_000
TAGS = 5_000
"""A bucket's messages have a tag of their own, so that the sums of several go on side by side."""
GENERATIONS = 4
"""Of tags: see `RingAllReduce`."""


class RingAllReduce(AllReduce):
    """Sums in ``dtype``, in the memory that is sent: on the CPU in the gradient's own.

    Every sum is added up in one place and copied from there, so that all ranks get the same bits.

    Args:
        transport: among whose ranks is summed.
        device: where the gradients live.
        dtype: of what is sent and added.
        generation: another one than those before whose messages may still be under way.
    """

    name = "ring"

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        dtype: torch.dtype,
        generation: int = 0,
    ) -> None:
        self._transport = transport
        self._first_tag = FIRST_TAG + generation % GENERATIONS * TAGS
        self._buffers = Buffers(dtype, device, transport.needs_memory)
        self.in_order = collectives.HostByHost(transport.hosts)
        self._under_way: list[_Sum] = []
        self._dead: int | None = None

    def start(self, values: Tensor, key: int) -> PendingSum:
        """See :meth:`AllReduce.start`."""
        self._check()
        buffer, event = self._buffers.load(values, key)
        tag = self._first_tag + key % TAGS
        pending = _Sum(self, self._transport, values, buffer, tag, event)
        self._under_way.append(pending)
        pending.begin()
        return pending

    def finish(self, pending: _Sum) -> None:
        """Wait for one sum."""
        while not pending.steps.has_ended:
            pending.wait_for_step()
            self._check()
        self._under_way.remove(pending)
        Buffers.store(pending.buffer, pending.values)

    def abandon(self, dead: int) -> None:
        """See :meth:`AllReduce.abandon`."""
        self._dead = dead
        for pending in list(self._under_way):
            pending.steps.abandon()

    def _check(self) -> None:
        if self._dead is not None:
            self.abandon(self._dead)
            raise PeerFailedError(self._dead, "")

    def describe(self) -> str:
        """See :meth:`AllReduce.describe`."""
        return describe(self._transport, f"messages around a ring, added in {self._buffers.name}")


class _Sum(PendingSum):
    """One sum: as soon as a step's messages have ended, by whichever thread, the next begins."""

    def __init__(
        self,
        owner: RingAllReduce,
        transport: Transport,
        values: Tensor,
        buffer: Tensor,
        tag: int,
        event: Event | None,
    ) -> None:
        self.values = values
        self.buffer = buffer
        self._owner = owner
        self._transport = transport
        self._event = event
        channel = owner.in_order(collectives.channel_of(transport, tag))
        self.steps = Stepper(collectives.allreduce(channel, buffer), transport)

    def begin(self) -> None:
        """Once the values have come from the device."""
        if self._event is None:
            self.steps.advance()
        else:
            self._transport.when_done(self._event, self.steps.advance)

    def wait_for_step(self) -> None:
        """Wait for what is awaited at present, and go on."""
        if self._event is not None:
            await_event(self._transport, self._event)
        self._transport.wait(*self.steps.awaited)
        self.steps.advance()

    def wait(self) -> Tensor:
        self._owner.finish(self)
        return self.values
