"""All-reduces by a transport's own collectives and messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from aladdin_mpi.allreduce.base import AllReduce, Buffers, PendingSum
from aladdin_mpi.allreduce.compressed import InOrder
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.errors import PeerFailedError
from aladdin_mpi.flat.vectors import full
from aladdin_mpi.transport import collectives
from aladdin_mpi.transport.base import Event, Request, Transport, await_event
from aladdin_mpi.transport.group import Stepper


class SingleAllReduce(AllReduce):
    """The transport's own all-reduce in ``dtype``, with MPI into a separate buffer."""

    name = "mpi"

    def __init__(self, transport: Transport, device: torch.device, dtype: torch.dtype) -> None:
        self._transport = transport
        self._moves_bytes = transport.needs_memory
        self._buffers = Buffers(dtype, device, self._moves_bytes)
        self._order = InOrder(transport, most=None)

    def start(self, values: Tensor, key: int) -> PendingSum:
        """Start the transport's all-reduce in its turn."""
        buffer, event = self._buffers.load(values, key)
        total = self._buffers.total(buffer, key) if self._moves_bytes else None
        queued = self._order.put(lambda: self._transport.iallreduce(buffer, total), event)

        def wait() -> Tensor:
            self._order.wait(queued)
            result = buffer if total is None else total
            if buffer is values:  # on the CPU the sum is returned without a copy
                return result
            Buffers.store(result, values)
            return values

        return PendingSum(wait)

    def describe(self) -> str:
        """Return the network and the dtype."""
        return describe(self._transport, f"all-reduce in {self._buffers.name}")


class MessageAllReduce(AllReduce):
    """Sums by messages between ranks, which end with PeerFailedError if a rank fails."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._in_progress: list[_DirectSum | _Sum] = []
        self._failed_rank: int | None = None

    def abandon(self, failed_rank: int) -> None:
        """End the waits of all sums in progress."""
        self._failed_rank = failed_rank
        for pending in list(self._in_progress):
            pending.abandon()

    def _check(self) -> None:
        """Raise PeerFailedError after a failure; also abandon messages sent since then."""
        if self._failed_rank is not None:
            self.abandon(self._failed_rank)
            raise PeerFailedError(self._failed_rank, "")

    def _begin(
        self, steps: collectives.Steps, event: Event | None, end: Callable[[], Tensor]
    ) -> PendingSum:
        """Run ``steps`` once ``event``, if any, has occurred; the result is that of ``end``.

        The thread in which the messages of a step end continues with the next step.
        """
        stepper = Stepper(steps, self._transport)
        pending = _Sum(self._transport, stepper, event)
        self._in_progress.append(pending)
        pending.begin()

        def wait() -> Tensor:
            while not stepper.has_ended:
                pending.wait_for_step()
                self._check()
            self._in_progress.remove(pending)
            return end()

        return PendingSum(wait)


def divide(numel: int, ranks: int) -> list[slice]:
    """Return each rank's part of a bucket; their sizes differ by at most one value."""
    bounds = [numel * i // ranks for i in range(ranks + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


class DirectAllReduce(MessageAllReduce):
    """Sum of the wire's values in fp32: a reduce-scatter and an all-gather, one round each.

    All ranks get a bit-identical result: the sum of all ranks' rounded values, rounded once more.
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
        self._spaces: dict[int, _Partition] = {}
        self._scattering: deque[_DirectSum] = deque()

    def start(self, values: Tensor, key: int) -> PendingSum:
        """Start the reduce-scatter."""
        self._check()
        self._advance()
        buffer, event = self._buffers.load(values, key)
        space = self._spaces.get(key)
        if space is None or space.gathered.numel() != values.numel():
            gathered = self._buffers.like(buffer)
            space = self._spaces[key] = _Partition(self._transport, buffer, gathered)
        pending = _DirectSum(self._transport, values, buffer, event, space)
        self._in_progress.append(pending)
        self._exchange(pending)
        self._scattering.append(pending)
        self._check()
        return PendingSum(partial(self._finish, pending))

    def _exchange(self, pending: _DirectSum) -> None:
        """Send each rank its part of the buffer, and post the receives."""
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
        """Post the receives of the all-gather.

        The device may still be reading the previous sums from that memory, but not once the event
        has occurred, since that copy precedes it on the device.
        """
        space = pending.space
        for peer in space.peers:
            if space.size(peer):
                gathered = space.gathered[space.parts[peer]]
                pending.others.append(self._transport.irecv(gathered, peer, self._gather))

    def _advance(self) -> None:
        """Send, in order, the sums for which every rank's part has arrived."""
        while self._scattering:
            first = self._scattering[0]
            if first.event is not None and not first.event.query():
                return
            if not all(map(self._transport.test, first.own)):
                return
            self._reduce(self._scattering.popleft())

    def _reduce(self, pending: _DirectSum) -> None:
        """Add this rank's part and send the sum to all ranks."""
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
        """Wait for one sum, after starting the all-gathers of earlier ones."""
        while not pending.reduced:
            first = self._scattering[0]
            if first.event is not None:
                await_event(self._transport, first.event)
            self._transport.wait(*first.own)
            self._check()
            self._advance()
        self._transport.wait(*pending.others)
        self._check()
        self._in_progress.remove(pending)
        Buffers.store(pending.space.gathered, pending.values)
        self._advance()
        return pending.values

    def describe(self) -> str:
        """Return the network and the dtype."""
        return describe(self._transport, f"messages in {self._buffers.name}, added in float32")


@dataclass(eq=False)
class _DirectSum:
    """A sum in progress; ``own``: receives of the first half, ``others``: all other requests."""

    transport: Transport
    values: Tensor
    buffer: Tensor
    event: Event | None
    space: _Partition
    own: list[Request] = field(default_factory=list)
    others: list[Request] = field(default_factory=list)
    reduced: bool = False

    def abandon(self) -> None:
        """End the waits for this sum."""
        for request in (*self.own, *self.others):
            self.transport.abandon(request)


class _Partition:
    """The division of a bucket among the ranks, and receive buffers for its messages.

    ``peers`` are the other ranks, starting at the next one, so that not all send to the same rank
    at once. ``parts[i]`` is rank i's part, ``received[i]`` what rank i sends of this rank's part.
    """

    def __init__(self, transport: Transport, buffer: Tensor, gathered: Tensor) -> None:
        rank, ranks, numel = transport.rank, transport.size, buffer.numel()
        self.rank = rank
        self.peers = [(rank + step) % ranks for step in range(1, ranks)]
        self.parts = divide(numel, ranks)
        self.gathered = gathered
        own = buffer[self.parts[rank]]
        self.received = {peer: torch.zeros_like(own) for peer in self.peers}

    def size(self, rank: int) -> int:
        """Return the number of values in the part of ``rank``."""
        return self.parts[rank].stop - self.parts[rank].start

    def add(self, buffer: Tensor, total: Tensor) -> None:
        """Write the sum of this rank's part into ``total``, in rank order for reproducibility."""
        if total.is_meta:
            return
        own = buffer[self.parts[self.rank]]
        pieces = {**self.received, self.rank: own}
        # 0.0 would erase the sign of -0.0 in all pieces.
        sums = torch.full((total.numel(),), -0.0, dtype=full(total.dtype))
        for rank in sorted(pieces):
            sums += pieces[rank]
        total.copy_(sums)


def describe(transport: Transport, how: str) -> str:
    """Return a description with the network."""
    return f"{'virtual network' if transport.models_time else 'MPI'}: {how}"


FIRST_TAG = 10_000
TAGS = 3_000
"""Number of tags: each bucket has its own, so that several sums can be in progress."""
GENERATIONS = 10
"""Number of generations of tags, see `RingAllReduce`."""


def tag_of(key: int, generation: int = 0) -> int:
    """Return the tag of the messages about the bucket with this index."""
    return FIRST_TAG + generation % GENERATIONS * TAGS + key % TAGS


class RingAllReduce(MessageAllReduce):
    """All-reduce in ``dtype`` around a ring, in the send buffer: on the CPU the gradient itself.

    Each value is summed on one rank and copied to all, so the results are bit-identical.

    Args:
        generation: differs from that of earlier sums whose messages may still be in flight.
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
        self._generation = generation
        self._buffers = Buffers(dtype, device, transport.needs_memory)
        self._in_order = collectives.HostByHost(transport.hosts)

    def start(self, values: Tensor, key: int) -> PendingSum:
        """Start the sum in the bucket's own channel."""
        self._check()
        buffer, event = self._buffers.load(values, key)
        tag = tag_of(key, self._generation)
        channel = self._in_order(collectives.channel_of(self._transport, tag))

        def end() -> Tensor:
            Buffers.store(buffer, values)
            return values

        return self._begin(collectives.allreduce(channel, buffer), event, end)

    def describe(self) -> str:
        """Return the network and the dtype."""
        return describe(self._transport, f"messages around a ring, added in {self._buffers.name}")


@dataclass(eq=False)
class _Sum:
    """One sum: the thread that completes a step's messages starts the next step."""

    transport: Transport
    steps: Stepper
    event: Event | None

    def abandon(self) -> None:
        """End the waits for this sum."""
        self.steps.abandon()

    def begin(self) -> None:
        """Start once the values have been copied from the device."""
        if self.event is None:
            self.steps.advance()
        else:
            self.transport.when_done(self.event, self.steps.advance)

    def wait_for_step(self) -> None:
        """Wait for the messages of the current step, and start the next one."""
        if self.event is not None:
            await_event(self.transport, self.event)
        self.transport.wait(*self.steps.awaited)
        self.steps.advance()
