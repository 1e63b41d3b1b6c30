"""Messages of the virtual engine, and how receives find them."""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from aladdin_mpi.errors import TransportError
from aladdin_mpi.transport.base import ANY_SOURCE, Request

Payload: TypeAlias = "Tensor | tuple[float, ...] | None"
"""What a message holds: values, numbers that are handed over as they are, or a size alone."""
QUANTUM = 256 * 2**10
"""Bytes of one flow that a link serves before it turns to the next. TCP shares a link packet by
packet: with whole messages of 4 MB in turn EASGD came out up to a fifth faster than over TCP."""
PIECES = 16
"""Of a message at most: one of more than 4 MiB goes in larger pieces, which share a link as well
in proportion to it, for a simulation of a thousand workers has to look at each piece."""


class Waiter(Protocol):
    """What is told of an operation's end in the place of the rank."""

    def operation_done(self, operation: Request) -> None:
        """It is done, or has failed."""
        ...


class Operation(Request):
    """A send or a receive of one rank; ``waiter`` is told of its end, if there is one.

    ``name`` is what the waiter calls it.
    """

    __slots__ = ("capacity", "name", "peer", "serial", "tag", "waiter")

    def __init__(self, what: str, buffer: Tensor | None, peer: int, tag: int, nbytes: int) -> None:
        self.what = what
        self.buffer = buffer
        self.done = False
        self.source = ANY_SOURCE
        self.nbytes = 0
        self.order = -1
        self.failed = None
        self.numbers = None
        self.peer = peer
        self.tag = tag
        self.capacity = nbytes
        self.serial = self.name = 0
        self.waiter: Waiter | None = None

    def __repr__(self) -> str:
        peer = "any rank" if self.peer == ANY_SOURCE else f"rank {self.peer}"
        side, size = ("to", "") if self.what == "send" else ("from", "up to ")
        state = "done" if self.done else "pending"
        return (
            f"<{self.what} of {size}{self.capacity} bytes {side} {peer}, tag {self.tag}: {state}>"
        )


class Message:
    """One message under way.

    ``request`` is the send that is done once the message has been received, or
    None if the sender no longer cares. A ``free`` one takes only the latency. ``unsent`` bytes
    have not started, besides those of its flow's ``midst``.
    """

    __slots__ = (
        "arrived",
        "dest",
        "free",
        "nbytes",
        "payload",
        "piece",
        "request",
        "source",
        "tag",
        "unsent",
    )

    def __init__(
        self,
        source: int,
        dest: int,
        tag: int,
        nbytes: int,
        payload: Payload,
        request: Operation | None,
        free: bool = False,
    ) -> None:
        self.free = free
        self.source = source
        self.dest = dest
        self.tag = tag
        self.nbytes = nbytes
        self.payload = payload
        self.request = request
        self.unsent = nbytes
        self.piece = QUANTUM if nbytes <= PIECES * QUANTUM else -(-nbytes // PIECES)
        self.arrived = False


class Mailbox:
    """The posted receives of one rank, and the messages that no receive has matched yet."""

    __slots__ = ("_posted", "_serial", "_unexpected")

    def __init__(self) -> None:
        self._posted: dict[tuple[int, int], deque[Operation]] = {}
        self._unexpected: dict[int, dict[int, deque[tuple[int, Message]]]] = {}
        """By tag and source, each message with the number of its arrival."""
        self._serial = 0

    def post(self, receive: Operation) -> None:
        """Keep ``receive`` until a message matches it."""
        self._serial += 1
        receive.serial = self._serial
        key = (receive.peer, receive.tag)
        queue = self._posted.get(key)
        if queue is None:
            self._posted[key] = queue = deque()
        queue.append(receive)

    def match(self, message: Message) -> Operation | None:
        """Take out the receive posted first of those that ``message`` fits."""
        posted = self._posted
        key = (message.source, message.tag)
        queue = posted.get(key)
        wild = posted.get((ANY_SOURCE, message.tag))
        if wild is not None and (queue is None or wild[0].serial < queue[0].serial):
            key, queue = (ANY_SOURCE, message.tag), wild
        if queue is None:
            return None
        receive = queue.popleft()
        if not queue:
            del posted[key]
        return receive

    def withdraw(self, receive: Operation) -> bool:
        """Take back a posted receive; return False if it is not posted."""
        key = (receive.peer, receive.tag)
        queue = self._posted.get(key)
        if queue is None or receive not in queue:
            return False
        queue.remove(receive)
        if not queue:
            del self._posted[key]
        return True

    def withdraw_all(self, source: int | None = None) -> list[Operation]:
        """Take back the receives that name ``source``, or all of them."""
        keys = [key for key in self._posted if source is None or key[0] == source]
        return [receive for key in keys for receive in self._posted.pop(key)]

    def withdraw_tags(self, tags: range) -> list[Operation]:
        """Take back the receives of these tags."""
        keys = [key for key in self._posted if key[1] in tags]
        return [receive for key in keys for receive in self._posted.pop(key)]

    def keep(self, message: Message) -> None:
        """Keep an unexpected message."""
        self._serial += 1
        queues = self._unexpected.setdefault(message.tag, {})
        queues.setdefault(message.source, deque()).append((self._serial, message))

    def take(self, source: int, tag: int) -> Message | None:
        """Take out the unexpected message for a new receive that arrived first."""
        queues = self._unexpected.get(tag)
        if queues is None:
            return None
        if source == ANY_SOURCE:
            source = min(queues, key=lambda each: queues[each][0][0])
        queue = queues.get(source)
        if queue is None:
            return None
        _, message = queue.popleft()
        if not queue:
            del queues[source]
            if not queues:
                del self._unexpected[tag]
        return message

    def unexpected(self) -> list[Message]:
        """Return all unexpected messages, those of a tag in the order of their arrival."""
        return [
            message
            for queues in self._unexpected.values()
            for _, message in sorted(chain.from_iterable(queues.values()), key=_number)
        ]


def _number(kept: tuple[int, Message]) -> int:
    return kept[0]


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor of any dtype as a vector of bytes."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)  # its strides may not allow the view
    if _is_plain(tensor):
        # As most are: every view takes a microsecond.
        return tensor if tensor.dtype == torch.uint8 else tensor.view(torch.uint8)
    return tensor.detach().view(-1).view(torch.uint8)


def copied(payload: Payload) -> Payload:
    """A copy of what may change, to be read by :func:`as_bytes` or :func:`fill`."""
    if payload is None or isinstance(payload, tuple):
        return payload
    return (payload if _is_plain(payload) else as_bytes(payload)).clone()


def in_memory(payload: Tensor | tuple[float, ...]) -> Tensor:
    """Numbers as a tensor."""
    return torch.tensor(payload, dtype=torch.float64) if isinstance(payload, tuple) else payload


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dim() == 1 and not tensor.requires_grad


def fill(receive: Operation, message: Message) -> None:
    """Put ``message`` into the buffer of ``receive``.

    Raises:
        TransportError: the message is longer than the buffer.
    """
    nbytes = message.nbytes
    if nbytes > receive.capacity:
        raise too_long(message, receive.capacity)
    buffer, payload = receive.buffer, message.payload
    if isinstance(payload, tuple):
        receive.numbers = payload
    elif payload is not None and buffer is not None and not buffer.is_meta:
        _copy(buffer, payload, nbytes)
    receive.source = message.source
    receive.nbytes = nbytes


def _copy(buffer: Tensor, payload: Tensor, nbytes: int) -> None:
    """Put ``payload``, of ``nbytes``, at the beginning of ``buffer``."""
    if buffer.dtype != payload.dtype or not (_is_plain(buffer) and _is_plain(payload)):
        buffer, payload = as_bytes(buffer), as_bytes(payload)
    if buffer.nbytes > nbytes:
        buffer = buffer[: payload.numel()]
    buffer.copy_(payload)


def too_long(message: Message, capacity: int) -> TransportError:
    """Return the error of a message that exceeds what its receiver has room for."""
    return TransportError(
        f"a message of {message.nbytes} bytes from rank {message.source} with tag {message.tag} "
        f"does not fit the receive of {capacity} bytes on rank {message.dest}: "
        "give both sides the same size"
    )
