"""Messages of the virtual engine, the operations of its ranks, and how receives find messages."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Protocol, TypeAlias, cast

import torch
from torch import Tensor

from aladdin_mpi.errors import PeerFailedError, TransportError
from aladdin_mpi.transport.base import ANY_SOURCE, Request, WaitSet, as_bytes, is_plain
from aladdin_mpi.transport.collectives import Steps
from aladdin_mpi.transport.virtual.fiber import Fiber

Payload: TypeAlias = "Tensor | tuple[float, ...] | None"
"""What a message holds: values, numbers that are handed over as they are, or a size alone."""
QUANTUM = 256 * 2**10
"""Bytes of one flow that a link serves before it turns to the next. TCP shares a link packet by
packet: with whole messages of 4 MB in turn EASGD came out up to a fifth faster than over TCP."""
PIECES = 16
"""Of a message at most: one of more than 4 MiB goes in larger pieces, which share a link as well
in proportion to it, for a simulation of a thousand workers has to look at each piece."""


class Waiter(Protocol):
    """An object that is notified of an operation's end instead of the rank."""

    def operation_done(self, operation: Request) -> None:
        """The operation is done, or has failed."""
        ...


class Operation(Request):
    """A send or a receive of one rank; ``waiter``, if any, is notified of its end.

    ``name`` is what the waiter calls it.
    """

    __slots__ = ("capacity", "name", "peer", "serial", "tag", "waiter")

    def __init__(self, what: str, buffer: Tensor | None, peer: int, tag: int, nbytes: int) -> None:
        super().__init__(what, buffer)
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


@dataclass(slots=True, eq=False)
class Message:
    """One message under way.

    ``request`` is the send that is done once the message has been received, or
    None if the sender no longer cares. A ``free`` one takes only the latency. On a link it goes in
    pieces of ``piece`` bytes; ``unsent`` bytes have not started, besides those of its flow's
    ``midst``.
    """

    source: int
    dest: int
    tag: int
    nbytes: int
    payload: Payload
    request: Operation | None
    free: bool = False
    arrived: bool = False
    unsent: int = 0
    piece: int = 0

    def cut(self) -> None:
        """Prepare to go in pieces."""
        self.unsent = self.nbytes
        self.piece = QUANTUM if self.nbytes <= PIECES * QUANTUM else -(-self.nbytes // PIECES)


class VirtualWaitSet(WaitSet, Collection[Request]):
    """A set whose requests tell it when they are done.

    A server of a thousand workers takes millions of messages: a wait must not cost more
    where there are more workers. Its requests must not be waited for elsewhere.
    """

    def __init__(self, fiber: Fiber, host_names: Sequence[str]) -> None:
        self.requests: dict[int, Request] = {}
        self._fiber = fiber
        self._host_names = host_names
        self._done: list[tuple[int, int, Request]] = []

    def __contains__(self, request: object) -> bool:
        return False  # the rank need not look for a request: each tells of its end

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests.values())

    def __len__(self) -> int:
        return len(self.requests)

    def put(self, name: int, request: Request) -> None:
        """See :meth:`WaitSet.put`; sends and receives only."""
        assert isinstance(request, Operation)
        self._forget(name)
        self.requests[name] = request
        request.name = name
        request.waiter = self
        if request.done:
            self.operation_done(request)

    def drop(self, name: int) -> None:
        """See :meth:`WaitSet.drop`."""
        self._forget(name)
        del self.requests[name]

    def _forget(self, name: int) -> None:
        replaced = self.requests.get(name)
        if isinstance(replaced, Operation):
            replaced.waiter = None

    def operation_done(self, operation: Request) -> None:
        """Note that one of the requests is done, and wake the rank if it waits for that."""
        assert isinstance(operation, Operation)
        heapq.heappush(self._done, (operation.order, operation.name, operation))
        self._fiber.news(self)

    def ended(self) -> list[int]:
        """See :meth:`WaitSet.ended`; those that wait cost nothing."""
        return [name for _, name, each in self._done if self.requests.get(name) is each]

    def wait(self) -> int:
        """See :meth:`WaitSet.wait`."""
        while True:
            while self._done:
                _, name, request = self._done[0]
                if self.requests.get(name) is request:
                    if request.failed is not None:
                        raise PeerFailedError(request.failed, self._host_names[request.failed])
                    return name
                heapq.heappop(self._done)  # has been replaced since
            self._fiber.wait(self, None)


class Collective(Request):
    """A collective of one rank, under way.

    ``resume`` is called to have the engine call :meth:`advance`, ``finish`` at the end.
    """

    __slots__ = ("_finish", "_missing", "_resume", "pending", "steps")

    waiter = None

    def __init__(
        self,
        what: str,
        steps: Steps,
        resume: Callable[[Collective], None],
        finish: Callable[[Collective], None],
    ) -> None:
        super().__init__(what)
        self.steps = steps
        self._resume = resume
        self._finish = finish
        self._missing = 0
        self.pending: Sequence[Operation] = ()

    def advance(self) -> None:
        """Go on as far as no operation is awaited."""
        if self.done:
            return
        for operations in self.steps:
            pending = [cast(Operation, each) for each in operations if not each.done]
            if pending:
                self.pending = pending
                self._missing = len(pending)
                for operation in pending:
                    operation.waiter = self
                return
        self._finish(self)

    def operation_done(self, operation: Request) -> None:
        """Note that an operation that this collective waits for is done."""
        self._missing -= 1
        if not self._missing:
            self._resume(self)


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

    def withdraw_where(self, applies: Callable[[int, int], bool]) -> list[Operation]:
        """Take back the receives to whose source and tag ``applies``."""
        keys = [key for key in self._posted if applies(*key)]
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
        by_number = itemgetter(0)
        return [
            message
            for queues in self._unexpected.values()
            for _, message in sorted(chain.from_iterable(queues.values()), key=by_number)
        ]


def copied(payload: Payload) -> Payload:
    """Return a copy of what may change."""
    if payload is None or isinstance(payload, tuple):
        return payload
    return (payload if is_plain(payload) else as_bytes(payload)).clone()


def handed(message: Message) -> Tensor:
    """Return a message as its handler gets it: bytes that nothing else uses."""
    payload = message.payload
    if payload is None:
        device = "meta" if message.nbytes else "cpu"
        return torch.empty(message.nbytes, dtype=torch.uint8, device=device)
    if isinstance(payload, tuple):
        return as_bytes(torch.tensor(payload, dtype=torch.float64))
    return as_bytes(payload) if message.request is None else as_bytes(payload).clone()


def handed_numbers(message: Message) -> tuple[float, ...] | list[float]:
    """Return the numbers that a message holds."""
    if isinstance(message.payload, tuple):
        return message.payload
    numbers: list[float] = handed(message).view(torch.float64).tolist()
    return numbers


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
        if buffer.dtype != payload.dtype or not (is_plain(buffer) and is_plain(payload)):
            buffer, payload = as_bytes(buffer), as_bytes(payload)
        if buffer.nbytes > nbytes:
            buffer = buffer[: payload.numel()]
        buffer.copy_(payload)
    receive.source = message.source
    receive.nbytes = nbytes


def too_long(message: Message, capacity: int) -> TransportError:
    """Return the error of a message that does not fit its receive."""
    return TransportError(
        f"a message of {message.nbytes} bytes from rank {message.source} with tag {message.tag} "
        f"does not fit the receive of {capacity} bytes on rank {message.dest}: "
        "give both sides the same size"
    )
