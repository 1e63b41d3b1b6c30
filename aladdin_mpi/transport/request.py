"""An operation under way between two ranks, and how it can fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

ANY_SOURCE = -1
"""Receive from whichever rank sends first with the given tag."""


class Event(Protocol):
    """Something that happens outside the transport, such as a CUDA event."""

    def query(self) -> bool:
        """Return whether it has happened."""
        ...


class Request:
    """An operation under way.

    ``done`` is set when it has ended; ``source`` and ``nbytes`` then describe a received
    message, and ``order`` is a counter that grows with every completion on this
    rank, so that messages can be taken in their order of arrival. ``failed`` is
    the dead rank at the other end, if that is how the operation ended. ``numbers`` are those of
    :meth:`Transport.isend_numbers` where an engine hands them over as they are, and not in
    ``buffer``.
    """

    __slots__ = ("buffer", "done", "failed", "nbytes", "numbers", "order", "source", "what")

    def __init__(self, what: str, buffer: Tensor | None = None) -> None:
        self.what = what
        self.buffer = buffer
        self.done = False
        self.source = ANY_SOURCE
        self.nbytes = 0
        self.order = -1
        self.failed: int | None = None
        self.numbers: tuple[float, ...] | None = None

    def __repr__(self) -> str:
        state = "done" if self.done else "pending"
        return f"<{self.what}: {state}>"


def numbers_of(receive: Request) -> Sequence[float]:
    """What a receive has brought that :meth:`Transport.isend_numbers` has sent."""
    if receive.numbers is not None:
        return receive.numbers
    assert receive.buffer is not None
    found: list[float] = receive.buffer[: receive.nbytes // receive.buffer.itemsize].tolist()
    return found
