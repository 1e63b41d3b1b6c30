"""Virtual time: the two ends of a message, and the message under way."""

from __future__ import annotations

from typing import Protocol, TypeAlias

from torch import Tensor

from aladdin_mpi.transport.request import ANY_SOURCE, Request

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
