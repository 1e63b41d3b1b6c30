"""The interface between algorithms and the two engines."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from aladdin_mpi.errors import PeerFailedError


class WaitSet:
    """Requests by name, of which :meth:`wait` finds the one that was done first.

    The same as ``wait_any`` over a list in which one request is replaced at a time. An
    engine may have a set of its own, whose waits do not look at every request.

    Args:
        wait_any: of the transport.
    """

    def __init__(self, wait_any: Callable[[Sequence[Request]], int]) -> None:
        self.requests: dict[int, Request] = {}
        self._wait_any = wait_any

    def put(self, name: int, request: Request) -> None:
        """Wait for ``request`` from now on, under this name, and not for the one before it."""
        self.requests[name] = request

    def drop(self, name: int) -> None:
        """Wait no more for the request of this name."""
        del self.requests[name]

    def ended(self) -> list[int]:
        """The names of those known to have ended."""
        return [name for name, request in self.requests.items() if request.done]

    def wait(self) -> int:
        """Wait until one is done; the name of the first. It stays until it is replaced.

        Raises:
            PeerFailedError, WaitTimeoutError: as ``wait_any`` does.
        """
        first = self._wait_any(list(self.requests.values()))
        return list(self.requests)[first]


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


EVENT_POLL = 0.0001
"""Seconds between two looks at an event."""

T = TypeVar("T")
Handler = Callable[[int, "Tensor"], None]
"""Called as ``handler(source, message)`` when a registered message arrives."""
NumbersHandler = Callable[[int, "Sequence[float]"], None]
IdleUntil = Callable[[], "Sequence[Request] | None"]
"""Says which requests something waits for, one of them at least to end; None: for nothing."""


@dataclass
class Traffic:
    """Running totals of one rank. Times in seconds, sizes in bytes.

    ``waiting`` is the time that this rank spent blocked in ``wait``,
    ``wait_any`` and ``wait_all``.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    waiting: float = 0.0


class Transport(ABC):
    """One rank's door to the others.

    Buffers are contiguous CPU tensors of any dtype; they must be left alone from
    the call that names them until the request is done. Messages between two
    ranks with one tag arrive in the order in which they were sent. A receive
    buffer may be larger than the message that it takes. Several receives may be
    posted for one (source, tag); they are filled in the order of posting.
    """

    rank: int
    size: int
    traffic: Traffic
    hosts: Sequence[int]
    """For every rank the number of its host, counted from 0."""
    engine: str
    """``"mpi"`` or ``"virtual"``: to be reported; what it can do is said below."""
    models_time: bool
    """Whether time is modelled: it passes by messages and ``sleep``, and computing takes none."""
    shares_process: bool
    """Whether all ranks are in one process, with one set of signals, random states and devices."""
    needs_memory: bool
    """Whether what is sent must lie in memory; otherwise tensors without any will do."""
    survives: bool
    """Whether the living are told of a rank's death and can go on."""
    has_collectives = True
    """Whether its ranks are all, so that the engine's collectives are there."""
    progresses: bool
    """Whether messages move, and are handled, while the rank computes."""
    meets = False
    """Whether there is :meth:`meet`."""

    @property
    def host(self) -> int:
        """The number of this rank's host."""
        return self.hosts[self.rank]

    def host_name(self, rank: int) -> str:
        """The name of a rank's host."""
        return str(self.hosts[rank])

    def original(self, rank: int) -> int:
        """The number that a rank has in the job, which users know it by."""
        return rank

    # -- in one process -----------------------------------------------------
    def meet(self, fact: Any) -> list[Any]:
        """Everyone's ``fact`` by rank, when all have called it: without messages or time."""
        raise NotImplementedError

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` returns; of ranks that share a process the first one's, for all."""
        return make()

    # -- time ---------------------------------------------------------------
    @abstractmethod
    def now(self) -> float:
        """Seconds since the transport started: real, or virtual."""

    @abstractmethod
    def sleep(self, seconds: float) -> None:
        """Let time pass as computing does: messages move on meanwhile."""

    @abstractmethod
    def charge_memory(self, nbytes: int) -> None:
        """A message is taken in or written, for which ``nbytes`` are read or written in memory.

        Where time is real that takes time by itself; where it is modelled, this lets it pass.
        """

    def sleep_until(self, moment: float) -> None:
        """As :meth:`sleep`, until ``now()`` is ``moment``; in virtual time exactly so."""
        self.sleep(max(0.0, moment - self.now()))

    def sleep_between(
        self,
        moments: Sequence[float],
        action: Callable[[int], None],
        idle_until: IdleUntil | None = None,
    ) -> None:
        """Call ``action(i)`` at the i-th of ``moments``, or at once if that is past.

        The rank sleeps in between. ``action`` may do all that the rank itself may. It need not be
        called before one of the requests that ``idle_until()`` returns has ended, if it would do
        nothing before; None: it has something to do now.
        """
        for index, moment in enumerate(moments):
            self.sleep(max(0.0, moment - self.now()))
            action(index)

    # -- point to point -----------------------------------------------------
    @abstractmethod
    def isend(self, buffer: Tensor, dest: int, tag: int, after: Event | None = None) -> Request:
        """Start to send all bytes of ``buffer``; with ``after``, once that has happened.

        Never waits. Sends of one tag to one rank leave in the order of the calls.
        """

    def isend_numbers(self, numbers: Sequence[float], dest: int, tag: int) -> Request:
        """Start to send numbers, in float64, to a receive of at least as many.

        They come in its buffer or, without having been in memory, in its ``numbers``.
        """
        # Half the time of torch.tensor(), and every message of a model has a header.
        data = bytearray(struct.pack(f"{len(numbers)}d", *numbers))
        return self.isend(torch.frombuffer(data, dtype=torch.float64), dest, tag)

    @abstractmethod
    def irecv(self, buffer: Tensor, source: int, tag: int) -> Request:
        """Post a receive into ``buffer``. Never waits."""

    @abstractmethod
    def test(self, request: Request) -> bool:
        """Return whether ``request`` is done.

        Raises:
            PeerFailedError: it ended because the rank at the other end died.
        """

    @abstractmethod
    def wait_any(self, requests: Sequence[Request], timeout: float | None = None) -> int:
        """Wait until one is done; return the index of the one that was done first.

        Requests that are done already count. ``timeout`` in seconds replaces the
        transport's own; returns -1 when a ``timeout`` given here runs out.

        Raises:
            PeerFailedError: the first to end ended because its peer died.
            WaitTimeoutError: nothing happened within the transport's timeout.
        """

    def wait(self, request: Request) -> None:
        """Wait until ``request`` is done. Raises as :meth:`wait_any` does."""
        self.wait_any([request])

    def wait_all(self, requests: Sequence[Request]) -> None:
        """Wait until all are done. Raises as :meth:`wait_any` does."""
        for request in requests:
            self.wait_any([request])

    def wait_set(self) -> WaitSet:
        """An empty set of requests to be waited for again and again."""
        return WaitSet(self.wait_any)

    def wait_ended(self, requests: Iterable[Request]) -> None:
        """Wait until all have ended, be it because a peer died."""
        for request in requests:
            with suppress(PeerFailedError):
                self.wait(request)

    @abstractmethod
    def cancel(self, request: Request) -> None:
        """Give up a posted receive that no message has matched yet."""

    @abstractmethod
    def abandon(self, request: Request) -> None:
        """End a send or a receive whose other end may never come; its memory is not used again.

        Handlers may call it: who waits for the request goes on.
        """

    @abstractmethod
    def abandon_tags(self, tags: range) -> None:
        """End all sends and receives of these tags, and hear no message of theirs any more.

        Their memory is not used again. For a group of ranks that has come apart.
        """

    @abstractmethod
    def exclude_from_traffic(self, *tags: int) -> None:
        """Leave messages of these tags out of ``traffic``; in virtual time they take no room.

        For what only serves to measure a run. Their sender has to call it, before it
        sends the first.
        """

    # -- messages that interrupt --------------------------------------------
    @abstractmethod
    def on_message(self, tag: int, nbytes: int, handler: Handler) -> None:
        """Have ``handler`` called for every message of ``tag``, even while computing.

        Messages are at most ``nbytes`` long; the handler gets them as ``uint8``
        tensors which are reused after it returns. Handlers of one rank run one at
        a time, never inside :meth:`atomic` of another thread of the rank, and
        must not wait; they may call :meth:`isend` and :meth:`now`.
        """

    def on_numbers(self, tag: int, most: int, handler: NumbersHandler) -> None:
        """As :meth:`on_message`, for at most so many numbers that :meth:`isend_numbers` sends."""
        self.on_message(
            tag,
            8 * most,
            lambda source, message: handler(source, message.view(torch.float64).tolist()),
        )

    @abstractmethod
    def atomic(self) -> AbstractContextManager[None]:
        """A section during which no handler of this rank runs."""

    def watch(self, look: Callable[[], None]) -> None:
        """Have ``look`` called now and then, also while the rank computes.

        For what comes from outside, such as signals; so never in virtual time. It is
        called by any thread, must be quick, and may do what a handler may.
        """
        return

    def unwatch(self, look: Callable[[], None]) -> None:
        """Have ``look`` called no more."""
        return

    # -- collectives: every rank calls them in the same order ----------------
    @abstractmethod
    def ibarrier(self) -> Request:
        """Done when every rank has called it."""

    @abstractmethod
    def ibroadcast(self, buffer: Tensor, root: int) -> Request:
        """Copy ``buffer`` of ``root`` into everyone's."""

    @abstractmethod
    def iallreduce(self, buffer: Tensor, total: Tensor | None = None) -> Request:
        """Put the sum of ``buffer`` over all ranks into ``total``; fp32, fp64 or int64.

        Args:
            buffer: left alone until it is done; what it then holds is not said, unless there
                is no ``total``.
            total: of the same length and dtype, which spares MPI a copy; None: ``buffer``.

        Raises:
            TypeError: for half precision, which MPI does not add rightly.
        """

    @abstractmethod
    def iallgather(self, buffer: Tensor, gathered: Tensor) -> Request:
        """Collect everyone's ``buffer`` in rank order; ``gathered`` is ``size`` times as long."""

    @abstractmethod
    def ialltoall(self, buffer: Tensor, received: Tensor) -> Request:
        """Send the i-th of ``size`` equal parts to rank i; receive likewise."""

    @abstractmethod
    def when_done(self, request: Request, action: Callable[[], None]) -> None:
        """Have ``action`` called once, as a handler, soon after ``request`` has ended.

        Even while the rank computes, so that one collective can follow another.

        Args:
            request: a collective, under way or ended, be it because a peer died.
            action: unlike other handlers it may start collectives.
        """

    @abstractmethod
    def when_happened(self, event: Event, action: Callable[[], None]) -> None:
        """Have ``action`` called once, as :meth:`when_done` does, soon after ``event``.

        For what a device does, so that a collective starts as soon as its buffer is filled.
        """

    def await_event(self, event: Event) -> None:
        """Wait until ``event`` has happened; messages move on meanwhile."""
        while not event.query():
            self.sleep(EVENT_POLL)

    # -- failure and end ------------------------------------------------------
    @property
    @abstractmethod
    def failed(self) -> frozenset[int]:
        """The ranks known to have died, and those excluded."""

    @abstractmethod
    def on_failure(self, action: Callable[[int], None]) -> None:
        """Have ``action`` called, as a handler, with every rank that fails from now on.

        What waited for that rank has ended then, with :class:`PeerFailedError`; so does
        every collective, which needs all ranks.
        """

    @property
    @abstractmethod
    def excluded(self) -> frozenset[int]:
        """Those of ``failed`` that may live, but have sent no heartbeat for too long."""

    @abstractmethod
    def exclude(self, rank: int) -> None:
        """Take ``rank`` as failed from now on, though it may live.

        That is all between this rank and that one: nothing is sent to it any more, nothing
        that comes from it is taken. The others have to do the same.
        """

    @property
    def is_revoked(self) -> bool:
        """Whether a rank is lost without which these cannot go on, so that no wait is one."""
        return False

    def is_revoked_without(self, rank: int) -> bool:
        """Whether those who are left form a new group when ``rank`` is lost: see :mod:`.group`."""
        return False

    @property
    def living(self) -> list[int]:
        """The ranks that are not known to have failed."""
        return [rank for rank in range(self.size) if rank not in self.failed]

    def survivors_from(self, first: int) -> int:
        """Return the number of ranks from ``first`` on that are not known to have failed."""
        return self.size - first - sum(rank >= first for rank in self.failed)

    @abstractmethod
    def close(self, status: int = 0) -> None:
        """Complete or cancel what is under way and stop. To be called once, by every rank.

        Args:
            status: with which the program is going to end.
        """
