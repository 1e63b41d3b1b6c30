"""Collectives over point-to-point messages, by the algorithms common in MPI.

Each algorithm is a generator that starts sends and receives and yields those that must be done
before it continues, so that a collective progresses while its rank computes. Tensors on the
device "meta" are sent as sizes: their parts are None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from aladdin_mpi.transport.base import Request, Transport, as_bytes

SMALL = 64 * 1024
"""Largest size for which an all-reduce uses a tree, which needs few messages; larger ones use a
ring, which moves the fewest bytes. Also the largest part of which an all-to-all sends one to each
rank at once."""
SMALL_GATHER = 512 * 1024
"""Largest size for which an all-gather uses Bruck's algorithm, which has log2(n) steps; a larger
one uses a ring, which leaves each host once. As in MPICH."""
RING_RANKS = 32
"""Largest number of ranks for which a long all-reduce uses the ring. With more, its 2(n-1)
sequential messages cost more than their bytes; halving and doubling takes 2 log2(n) for the same
bytes (Thakur, Rabenseifner, Gropp, Int. J. High Performance Computing Applications 19, 2005)."""

Steps = Iterator[Sequence[Request]]
Part = tuple["Tensor | None", int]
"""A piece of a buffer (None if the buffer contains no data) and its size in bytes."""
REDUCIBLE = (torch.float32, torch.float64, torch.int64)


def check_reducible(buffer: Tensor) -> None:
    """Raise a TypeError for a buffer that cannot be summed, such as half precision."""
    if buffer.dtype not in REDUCIBLE:
        raise TypeError(
            f"iallreduce adds {', '.join(map(str, REDUCIBLE))}, not {buffer.dtype}, "
            "which MPI does not add rightly: convert it first"
        )


def allreduce_bytes(nbytes: int, ranks: int) -> int:
    """Return 2(n-1)/n of the buffer: a reduce-scatter, then an all-gather of the parts."""
    return 2 * nbytes * (ranks - 1) // ranks


def allgather_bytes(nbytes: int, ranks: int) -> int:
    """Return n-1 times one rank's buffer: every part passes through every rank but one."""
    return nbytes * (ranks - 1)


def partial_bytes(nbytes: int, ranks: int) -> int:
    """Return (n-1)/n of the buffer: all parts but the rank's own, or the mean of a broadcast."""
    return nbytes * (ranks - 1) // ranks


@dataclass
class Channel:
    """Point-to-point messages among the ranks of one collective."""

    rank: int
    size: int
    send: Callable[[int, Part], Request]
    receive: Callable[[int, Part], Request]


def channel_of(transport: Transport, tag: int) -> Channel:
    """Return a channel among all ranks of ``transport``, for messages with one tag."""
    return Channel(
        transport.rank,
        transport.size,
        lambda dest, part: transport.isend(_as_tensor(part), dest, tag),
        lambda source, part: transport.irecv(_as_tensor(part), source, tag),
    )


def _as_tensor(part: Part) -> Tensor:
    data, nbytes = part
    if data is not None:
        return data
    return torch.empty(nbytes, dtype=torch.uint8, device="meta" if nbytes else "cpu")


class HostByHost:
    """Ranks in the order of their hosts, so that a ring leaves each host once."""

    def __init__(self, hosts: Sequence[int]) -> None:
        self._ranks = sorted(range(len(hosts)), key=lambda rank: hosts[rank])
        self._is_plain = self._ranks == list(range(len(hosts)))
        self._places = {rank: place for place, rank in enumerate(self._ranks)}

    def __call__(self, channel: Channel) -> Channel:
        """Return ``channel`` in that order."""
        if self._is_plain:
            return channel
        ranks = self._ranks
        return Channel(
            self._places[channel.rank],
            channel.size,
            lambda dest, part: channel.send(ranks[dest], part),
            lambda source, part: channel.receive(ranks[source], part),
        )


class _Buffer:
    """A vector that can be cut into parts, with or without data."""

    def __init__(self, tensor: Tensor) -> None:
        self.vector = None if tensor.is_meta else tensor.detach().view(-1)
        self.item = tensor.element_size()
        self.length = tensor.numel()

    @classmethod
    def of_bytes(cls, tensor: Tensor) -> _Buffer:
        return cls(tensor if tensor.is_meta else as_bytes(tensor))

    def part(self, start: int, end: int) -> Part:
        data = None if self.vector is None else self.vector[start:end]
        return data, (end - start) * self.item

    def whole(self) -> Part:
        return self.part(0, self.length)

    def scratch(self, length: int) -> Part:
        data = None if self.vector is None else torch.empty(length, dtype=self.vector.dtype)
        return data, length * self.item

    def blocks(self, count: int) -> list[Part]:
        """Cut into ``count`` parts whose lengths differ by at most one item."""
        cuts = [self.length * i // count for i in range(count + 1)]
        return [self.part(start, end) for start, end in pairwise(cuts)]


def _copy(target: Part, origin: Part) -> None:
    if target[0] is not None and origin[0] is not None:
        target[0].copy_(origin[0])


def _add(target: Part, addend: Part) -> None:
    if target[0] is not None and addend[0] is not None:
        target[0].add_(addend[0][: target[0].numel()])


def barrier(channel: Channel) -> Steps:
    """Run a dissemination barrier: after round k, 2^k others have reached a rank indirectly."""
    rank, size = channel.rank, channel.size
    distance = 1
    while distance < size:
        sent = channel.send((rank + distance) % size, (None, 0))
        yield sent, channel.receive((rank - distance) % size, (None, 0))
        distance *= 2


def broadcast(channel: Channel, buffer: Tensor, root: int) -> Steps:
    """Broadcast along a binomial tree."""
    return _broadcast(channel, _Buffer(buffer).whole(), root)


def _broadcast(channel: Channel, part: Part, root: int) -> Steps:
    size = channel.size
    place = (channel.rank - root) % size
    mask = 1
    while mask < size and not place & mask:
        mask *= 2
    if place:
        yield (channel.receive((place - mask + root) % size, part),)
    sends = []
    while mask > 1:
        mask //= 2
        if place + mask < size:
            sends.append(channel.send((place + mask + root) % size, part))
    yield sends


def allreduce(channel: Channel, buffer: Tensor) -> Steps:
    """Sum along a binomial tree if the buffer is small, otherwise by ring, or halving and doubling.

    Each value is summed on one rank and copied to all, so results are bit-identical.
    """
    vector = _Buffer(buffer)
    if vector.length * vector.item <= SMALL:
        yield from _reduce(channel, vector)
        yield from _broadcast(channel, vector.whole(), root=0)
    elif channel.size <= RING_RANKS:
        yield from _ring_allreduce(channel, vector)
    else:
        yield from _halving_allreduce(channel, vector)


def _reduce(channel: Channel, vector: _Buffer) -> Steps:
    rank, size = channel.rank, channel.size
    total, addend = vector.whole(), vector.scratch(vector.length)
    mask = 1
    while mask < size:
        if rank & mask:
            yield (channel.send(rank - mask, total),)
            return
        if rank + mask < size:
            yield (channel.receive(rank + mask, addend),)
            _add(total, addend)
        mask *= 2


def _ring_allreduce(channel: Channel, vector: _Buffer) -> Steps:
    """Reduce-scatter, then all-gather, each in ``size - 1`` steps around the ring."""
    rank, size = channel.rank, channel.size
    following, previous = (rank + 1) % size, (rank - 1) % size
    blocks = vector.blocks(size)
    scratch, _ = vector.scratch(-(-vector.length // size))
    for step in range(size - 1):
        mine = blocks[(rank - step) % size]
        target = blocks[(rank - step - 1) % size]
        addend = (scratch, target[1])
        yield channel.send(following, mine), channel.receive(previous, addend)
        _add(target, addend)
    for step in range(size - 1):
        mine = blocks[(rank + 1 - step) % size]
        yield channel.send(following, mine), channel.receive(previous, blocks[(rank - step) % size])


def _halving_allreduce(channel: Channel, vector: _Buffer) -> Steps:
    """Reduce-scatter by halving, all-gather by doubling, among the first 2^k ranks.

    The nearest exchange, when most bytes move, comes first, since neighbours are often on one host.
    The vectors of the other ranks are added to those of the first ones before, and they receive
    the sum.
    """
    rank, size = channel.rank, channel.size
    core = 1 << (size.bit_length() - 1)
    if rank >= core:
        yield (channel.send(rank - core, vector.whole()),)
        yield (channel.receive(rank - core, vector.whole()),)
        return
    if rank + core < size:
        addend = vector.scratch(vector.length)
        yield (channel.receive(rank + core, addend),)
        _add(vector.whole(), addend)
    start, stop = 0, vector.length
    scratch, _ = vector.scratch(-(-vector.length // 2))
    halves: list[tuple[int, int, int]] = []
    for distance in (1 << power for power in range(core.bit_length() - 1)):
        middle = (start + stop) // 2
        low = not rank & distance
        mine, theirs = (
            ((start, middle), (middle, stop)) if low else ((middle, stop), (start, middle))
        )
        target = vector.part(*mine)
        sent = channel.send(rank ^ distance, vector.part(*theirs))
        yield sent, channel.receive(rank ^ distance, (scratch, target[1]))
        _add(target, (scratch, target[1]))
        halves.append((distance, *theirs))
        start, stop = mine
    for distance, first, last in reversed(halves):
        sent = channel.send(rank ^ distance, vector.part(start, stop))
        yield sent, channel.receive(rank ^ distance, vector.part(first, last))
        start, stop = min(start, first), max(stop, last)
    if rank + core < size:
        yield (channel.send(rank + core, vector.whole()),)


def allgather(channel: Channel, buffer: Tensor, gathered: Tensor) -> Steps:
    """Gather by Bruck's algorithm if the buffer is small, otherwise around a ring."""
    mine, every = _Buffer.of_bytes(buffer), _Buffer.of_bytes(gathered)
    if gathered.nbytes <= SMALL_GATHER:
        yield from _bruck_allgather(channel, mine, every)
        return
    rank, size = channel.rank, channel.size
    blocks = every.blocks(size)
    _copy(blocks[rank], mine.whole())
    for step in range(size - 1):
        sent = channel.send((rank + 1) % size, blocks[(rank - step) % size])
        yield sent, channel.receive((rank - 1) % size, blocks[(rank - step - 1) % size])


def _bruck_allgather(channel: Channel, mine: _Buffer, every: _Buffer) -> Steps:
    """Collect blocks in the order rank, rank + 1, ..., and rotate them at the end."""
    rank, size, length = channel.rank, channel.size, mine.length
    collected, _ = every.scratch(every.length)

    def span(first: int, last: int) -> Part:
        data = None if collected is None else collected[first * length : last * length]
        return data, (last - first) * length * every.item

    _copy(span(0, 1), mine.whole())
    have = 1
    while have < size:
        count = min(have, size - have)
        sent = channel.send((rank - have) % size, span(0, count))
        yield sent, channel.receive((rank + have) % size, span(have, have + count))
        have += count
    for i, block in enumerate(every.blocks(size)):
        at = (i - rank) % size
        _copy(block, span(at, at + 1))


def alltoall(channel: Channel, buffer: Tensor, received: Tensor) -> Steps:
    """Exchange small parts with all others at once, larger ones with one pair after the other."""
    rank, size = channel.rank, channel.size
    outgoing = _Buffer.of_bytes(buffer).blocks(size)
    incoming = _Buffer.of_bytes(received).blocks(size)
    _copy(incoming[rank], outgoing[rank])
    started: list[Request] = []
    for step in range(1, size):
        dest, source = (rank + step) % size, (rank - step) % size
        started += channel.send(dest, outgoing[dest]), channel.receive(source, incoming[source])
        if buffer.nbytes > SMALL * size:
            yield started
            started = []
    yield started
