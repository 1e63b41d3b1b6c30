"""Messages of the simulation engine, the operations of its ranks, and message matching."""

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
"""The contents of a message: values, numbers passed as they are, or only a size."""
QUANTUM = 256 * 2**10
"""Bytes of one flow that a link serves before the next flow. TCP shares a link packet by packet:
with whole messages of 4 MB in turn, EASGD was up to a fifth faster than over real TCP."""
PIECES = 16
"""Largest number of pieces of a message: one of more than 4 MiB is sent in larger pieces, with a
proportional share of a link, since a simulation of a thousand workers processes each piece."""


class Waiter(Protocol):
    """An object that is notified of an operation's end instead of the rank."""

    def operation_done(self, operation: Request) -> None:
        """Handle the end of an operation, by completion or failure."""
        ...


class Operation(Request):
    """A send or a receive of one rank; ``waiter``, if any, is notified of its end.

    ``name`` is the waiter's name for it.
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
    """One message in flight.

    ``request`` is the send that ends when the message is received, or None if it has ended. A
    ``free`` message takes only the latency. On a link it is sent in pieces of ``piece`` bytes;
    ``unsent`` bytes have not started, excluding those of its flow's ``middle_pieces``.
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
        """Prepare to be sent in pieces."""
        self.unsent = self.nbytes
        self.piece = QUANTUM if self.nbytes <= PIECES * QUANTUM else -(-self.nbytes // PIECES)


class VirtualWaitSet(WaitSet, Collection[Request]):
    """A set whose requests notify it of their end.

    A server of a thousand workers receives millions of messages, so the cost of a wait must not
    depend on the number of workers. Its requests must not be waited for elsewhere.
    """

    def __init__(self, fiber: Fiber, host_names: Sequence[str]) -> None:
        self.requests: dict[int, Request] = {}
        self._fiber = fiber
        self._host_names = host_names
        self._done: list[tuple[int, int, Request]] = []

    def __contains__(self, request: object) -> bool:
        return False  # the rank need not search for a request, as each notifies the set

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests.values())

    def __len__(self) -> int:
        return len(self.requests)

    def put(self, name: int, request: Request) -> None:
        """Wait for ``request``, a send or a receive, under this name."""
        assert isinstance(request, Operation)
        self._forget(name)
        self.requests[name] = request
        request.name = name
        request.waiter = self
        if request.done:
            self.operation_done(request)

    def drop(self, name: int) -> None:
        """Stop waiting for the request of this name."""
        self._forget(name)
        del self.requests[name]

    def _forget(self, name: int) -> None:
        replaced = self.requests.get(name)
        if isinstance(replaced, Operation):
            replaced.waiter = None

    def operation_done(self, operation: Request) -> None:
        """Record that one of the requests is done, and wake the rank if it waits for the set."""
        assert isinstance(operation, Operation)
        heapq.heappush(self._done, (operation.order, operation.name, operation))
        self._fiber.news(self)

    def ended(self) -> list[int]:
        """Return the names of the ended requests, at no cost for others."""
        return [name for _, name, each in self._done if self.requests.get(name) is each]

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait until one is done; return the name of the first, or None after ``timeout``."""
        while True:
            while self._done:
                _, name, request = self._done[0]
                if self.requests.get(name) is request:
                    if request.failed is not None:
                        raise PeerFailedError(request.failed, self._host_names[request.failed])
                    return name
                heapq.heappop(self._done)  # it has been replaced
            self._fiber.wait(self, timeout)
            if not self._done:
                return None


class Collective(Request):
    """A collective of one rank, in progress.

    ``resume`` makes the engine call :meth:`advance`; ``finish`` is called at the end.
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
        """Continue until a step has to wait for operations."""
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
        """Record that an operation of the current step is done."""
        self._missing -= 1
        if not self._missing:
            self._resume(self)


class Mailbox:
    """The posted receives of one rank, and its unexpected messages, not matched by a receive."""

    __slots__ = ("_posted", "_serial", "_unexpected")

    def __init__(self) -> None:
        self._posted: dict[tuple[int, int], deque[Operation]] = {}
        self._unexpected: dict[int, dict[int, deque[tuple[int, Message]]]] = {}
        """Messages by tag and source, each with the number of its arrival."""
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
        """Remove and return the first posted receive that matches ``message``."""
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
        """Remove a posted receive; return False if it is not posted."""
        key = (receive.peer, receive.tag)
        queue = self._posted.get(key)
        if queue is None or receive not in queue:
            return False
        queue.remove(receive)
        if not queue:
            del self._posted[key]
        return True

    def withdraw_where(self, applies: Callable[[int, int], bool]) -> list[Operation]:
        """Remove the receives for whose source and tag ``applies`` is true."""
        keys = [key for key in self._posted if applies(*key)]
        return [receive for key in keys for receive in self._posted.pop(key)]

    def keep(self, message: Message) -> None:
        """Keep an unexpected message."""
        self._serial += 1
        queues = self._unexpected.setdefault(message.tag, {})
        queues.setdefault(message.source, deque()).append((self._serial, message))

    def take(self, source: int, tag: int) -> Message | None:
        """Remove and return the first unexpected message for a new receive."""
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
        """Return all unexpected messages, those with one tag in order of arrival."""
        by_number = itemgetter(0)
        return [
            message
            for queues in self._unexpected.values()
            for _, message in sorted(chain.from_iterable(queues.values()), key=by_number)
        ]


def copied(payload: Payload) -> Payload:
    """Return a copy of a payload that may change."""
    if payload is None or isinstance(payload, tuple):
        return payload
    return (payload if is_plain(payload) else as_bytes(payload)).clone()


def handed(message: Message) -> Tensor:
    """Return a message in the form for its handler: bytes that nothing else uses."""
    payload = message.payload
    if payload is None:
        device = "meta" if message.nbytes else "cpu"
        return torch.empty(message.nbytes, dtype=torch.uint8, device=device)
    if isinstance(payload, tuple):
        return as_bytes(torch.tensor(payload, dtype=torch.float64))
    return as_bytes(payload) if message.request is None else as_bytes(payload).clone()


def handed_numbers(message: Message) -> tuple[float, ...] | list[float]:
    """Return the numbers in a message."""
    if isinstance(message.payload, tuple):
        return message.payload
    numbers: list[float] = handed(message).view(torch.float64).tolist()
    return numbers


def fill(receive: Operation, message: Message) -> None:
    """Copy ``message`` to the buffer of ``receive``.

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
