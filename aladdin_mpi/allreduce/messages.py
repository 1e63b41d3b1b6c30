"""All-reduces by a transport's own collectives and messages."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from aladdin_mpi.allreduce.base import AllReduce, Buffers, PendingSum
from aladdin_mpi.allreduce.compressed import InOrder
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

        def wait() -> Tensor:
            self._order.wait(queued)
            result = buffer if total is None else total
            if buffer is values:  # on the CPU the sum stays where it is
                return result
            Buffers.store(result, values)
            return values

        return PendingSum(wait)

    def describe(self) -> str:
        """See :meth:`AllReduce.describe`."""
        return describe(self._transport, f"all-reduce in {self._buffers.name}")


class _MessageAllReduce(AllReduce):
    """Sums by messages between ranks, which end with PeerFailedError when a rank fails."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._under_way: list[_DirectSum | _Sum] = []
        self._dead: int | None = None

    def abandon(self, dead: int) -> None:
        """See :meth:`AllReduce.abandon`."""
        self._dead = dead
        for pending in list(self._under_way):
            pending.abandon()

    def _check(self) -> None:
        """Raise PeerFailedError after a failure; abandon what has been sent since, too."""
        if self._dead is not None:
            self.abandon(self._dead)
            raise PeerFailedError(self._dead, "")


class DirectAllReduce(_MessageAllReduce):
    """Sums the wire's values in fp32: a reduce-scatter and an all-gather, each in one round.

    Every rank gets the same bits: the sum of everyone's rounded values, rounded once more.
    ``tags`` are those of the two rounds.
    """

    name = "mpi"

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        wire_dtype: torch.dtype,
        tags: tuple[int, int] = (Tag.REDUCE_SCATTER, Tag.ALL_GATHER),
    ) -> None:
        super().__init__(transport)
        self._scatter, self._gather = tags
        self._buffers = Buffers(wire_dtype, device, transport.needs_memory)
        self._spaces: dict[int, _Space] = {}
        self._scattering: deque[_DirectSum] = deque()

    def start(self, values: Tensor, key: int) -> PendingSum:
        """See :meth:`AllReduce.start`."""
        self._check()
        self._advance()
        buffer, event = self._buffers.load(values, key)
        space = self._spaces.get(key)
        if space is None or space.gathered.numel() != values.numel():
            gathered = self._buffers.like(buffer)
            space = self._spaces[key] = _Space(self._transport, buffer, gathered)
        pending = _DirectSum(self._transport, values, buffer, event, space)
        self._under_way.append(pending)
        self._exchange(pending)
        self._scattering.append(pending)
        self._check()
        return PendingSum(partial(self._finish, pending))

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
        while self._scattering:
            first = self._scattering[0]
            if first.event is not None and not first.event.query():
                return
            if not all(map(self._transport.test, first.own)):
                return
            self._reduce(self._scattering.popleft())

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

    def _finish(self, pending: _DirectSum) -> Tensor:
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
        return pending.values

    def describe(self) -> str:
        """See :meth:`AllReduce.describe`."""
        return describe(self._transport, f"messages in {self._buffers.name}, added in float32")


@dataclass(eq=False)
class _DirectSum:
    """``own`` are the receives of the first half, ``others`` all that has to end besides."""

    transport: Transport
    values: Tensor
    buffer: Tensor
    event: Event | None
    space: _Space
    own: list[Request] = field(default_factory=list)
    others: list[Request] = field(default_factory=list)
    reduced: bool = False

    def abandon(self) -> None:
        """Have the waits for it end."""
        for request in (*self.own, *self.others):
            self.transport.abandon(request)


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


def describe(transport: Transport, how: str) -> str:
    """What adds up, and over which network."""
    return f"{'virtual network' if transport.models_time else 'MPI'}: {how}"


FIRST_TAG = 10_000
TAGS = 5_000
"""A bucket's messages have a tag of their own, so that the sums of several go on side by side."""
GENERATIONS = 4
"""Of tags: see `RingAllReduce`."""


class RingAllReduce(_MessageAllReduce):
    """Sums in ``dtype``, in the memory that is sent: on the CPU in the gradient's own.

    Every sum is added up in one place and copied from there, so that all ranks get the same bits.

    Args:
        generation: differs from that of earlier sums whose messages may still be under way.
    """

    name = "ring"

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        dtype: torch.dtype,
        generation: int = 0,
    ) -> None:
        super().__init__(transport)
        self._first_tag = FIRST_TAG + generation % GENERATIONS * TAGS
        self._buffers = Buffers(dtype, device, transport.needs_memory)
        self._in_order = collectives.HostByHost(transport.hosts)

    def start(self, values: Tensor, key: int) -> PendingSum:
        """See :meth:`AllReduce.start`."""
        self._check()
        buffer, event = self._buffers.load(values, key)
        tag = self._first_tag + key % TAGS
        channel = self._in_order(collectives.channel_of(self._transport, tag))
        steps = Stepper(collectives.allreduce(channel, buffer), self._transport)
        pending = _Sum(self._transport, steps, event)
        self._under_way.append(pending)
        pending.begin()

        def wait() -> Tensor:
            while not steps.has_ended:
                pending.wait_for_step()
                self._check()
            self._under_way.remove(pending)
            Buffers.store(buffer, values)
            return values

        return PendingSum(wait)

    def describe(self) -> str:
        """See :meth:`AllReduce.describe`."""
        return describe(self._transport, f"messages around a ring, added in {self._buffers.name}")


@dataclass(eq=False)
class _Sum:
    """One sum: as soon as a step's messages have ended, by whichever thread, the next begins."""

    transport: Transport
    steps: Stepper
    event: Event | None

    def abandon(self) -> None:
        """Have the waits for it end."""
        self.steps.abandon()

    def begin(self) -> None:
        """Once the values have come from the device."""
        if self.event is None:
            self.steps.advance()
        else:
            self.transport.when_done(self.event, self.steps.advance)

    def wait_for_step(self) -> None:
        """Wait for the messages of the current step, and begin the next one."""
        if self.event is not None:
            await_event(self.transport, self.event)
        self.transport.wait(*self.steps.awaited)
        self.steps.advance()
