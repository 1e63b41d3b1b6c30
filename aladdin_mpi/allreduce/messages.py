"""All-reduces by a transport's own collectives and messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from aladdin_mpi.allreduce.base import AllReduce, Buffers, PendingSum
from aladdin_mpi.allreduce.compressed import InOrder
from aladdin_mpi.errors import PeerFailedError, UserError
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
        self._in_progress: list[_Sum] = []
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


def peers_of(transport: Transport) -> list[int]:
    """Return the other ranks, from the next one on, so that not all send to one rank at once."""
    return [(transport.rank + step) % transport.size for step in range(1, transport.size)]


def swap(
    transport: Transport, tag: int, messages: Iterable[tuple[int, Tensor, Tensor]]
) -> list[Request]:
    """Start to receive and send one round of messages: for each peer, its message and ours.

    Empty messages are left out, by the peer too.
    """
    requests: list[Request] = []
    for peer, received, sent in messages:
        if received.numel():
            requests.append(transport.irecv(received, peer, tag))
        if sent.numel():
            requests.append(transport.isend(sent, peer, tag))
    return requests


class DirectAllReduce(MessageAllReduce):
    """Sum of the wire's values in fp32: a reduce-scatter and an all-gather, one round each.

    All ranks get a bit-identical result: the sum of all ranks' rounded values, rounded once more.
    ``first_key`` is that of :class:`RingAllReduce`.
    """

    name = "mpi"

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        wire_dtype: torch.dtype,
        first_key: int = 0,
    ) -> None:
        super().__init__(transport)
        self._first_key = first_key
        self._buffers = Buffers(wire_dtype, device, transport.needs_memory)
        self._exchanges: dict[int, _Exchange] = {}

    def start(self, values: Tensor, key: int) -> PendingSum:
        """Send each rank its part; the sums follow when all parts have arrived."""
        self._check()
        buffer, event = self._buffers.load(values, key)
        exchange = self._exchanges.get(key)
        if exchange is None or exchange.gathered.numel() != values.numel():
            tag = tag_of(self._first_key + key)
            gathered = self._buffers.like(buffer)
            exchange = self._exchanges[key] = _Exchange(self._transport, buffer, gathered, tag)
        gathered = exchange.gathered

        def end() -> Tensor:
            Buffers.store(gathered, values)
            return values

        return self._begin(exchange.steps(buffer), event, end)

    def describe(self) -> str:
        """Return the network and the dtype."""
        return describe(self._transport, f"messages in {self._buffers.name}, added in float32")


class _Exchange:
    """The messages about one bucket, and memory for those that arrive.

    ``parts[i]`` is rank i's part, ``received[i]`` what rank i sends of this rank's part.
    """

    def __init__(self, transport: Transport, buffer: Tensor, gathered: Tensor, tag: int) -> None:
        self._transport = transport
        self._tag = tag
        self.peers = peers_of(transport)
        self.parts = divide(buffer.numel(), transport.size)
        self.gathered = gathered
        own = buffer[self.parts[transport.rank]]
        self.received = {peer: torch.zeros_like(own) for peer in self.peers}

    def steps(self, buffer: Tensor) -> collectives.Steps:
        """Exchange the parts of ``buffer``, add this rank's, and send the sum to all."""
        transport, tag, parts = self._transport, self._tag, self.parts
        total = self.gathered[parts[transport.rank]]
        pieces = ((peer, self.received[peer], buffer[parts[peer]]) for peer in self.peers)
        yield swap(transport, tag, pieces)  # only what is yielded can be abandoned
        self._add(buffer, total)
        sums = ((peer, self.gathered[parts[peer]], total) for peer in self.peers)
        yield swap(transport, tag, sums)

    def _add(self, buffer: Tensor, total: Tensor) -> None:
        """Write the sum of this rank's part into ``total``, in rank order for reproducibility."""
        if total.is_meta:
            return
        rank = self._transport.rank
        pieces = {**self.received, rank: buffer[self.parts[rank]]}
        # 0.0 would erase the sign of -0.0 in all pieces.
        sums = torch.full((total.numel(),), -0.0, dtype=full(total.dtype))
        for source in sorted(pieces):
            sums += pieces[source]
        total.copy_(sums)


def describe(transport: Transport, how: str) -> str:
    """Return a description with the network."""
    return f"{'virtual network' if transport.models_time else 'MPI'}: {how}"


FIRST_TAG = 10_000
TAGS = 30_000
"""Number of tags: each bucket has its own, so that several sums can be in progress."""


def tag_of(key: int) -> int:
    """Return the tag of the messages about the bucket with this key.

    Raises:
        UserError: all tags are used up.
    """
    if key >= TAGS:
        raise UserError(
            f"--bucket-mb: sums have {TAGS} tags, and each bucket uses one, or two with powersgd, "
            "after each failure others. Use larger buckets, or, after many failures, resume the "
            "run in a new job."
        )
    return FIRST_TAG + key


class RingAllReduce(MessageAllReduce):
    """All-reduce in ``dtype`` around a ring, in the send buffer: on the CPU the gradient itself.

    Each value is summed on one rank and copied to all, so the results are bit-identical.

    Args:
        first_key: added to keys. Those of earlier sums, whose messages may still be in flight,
            are smaller.
    """

    name = "ring"

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        dtype: torch.dtype,
        first_key: int = 0,
    ) -> None:
        super().__init__(transport)
        self._first_key = first_key
        self._buffers = Buffers(dtype, device, transport.needs_memory)
        self._in_order = collectives.HostByHost(transport.hosts)

    def start(self, values: Tensor, key: int) -> PendingSum:
        """Start the sum in the bucket's own channel."""
        self._check()
        buffer, event = self._buffers.load(values, key)
        tag = tag_of(self._first_key + key)
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
