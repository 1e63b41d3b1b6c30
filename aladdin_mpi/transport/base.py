"""The interface between algorithms and the two engines: four protocols form a transport."""

# Engines implement the methods marked as primitive, which are empty here.
# mypy: disable-error-code="empty-body"
# ruff: noqa: B027

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

ANY_SOURCE = -1
"""Receive from any rank, the message with the given tag that is sent first."""
EVENT_POLL = 0.0001
"""Seconds between two polls of an event."""

Sendable = Tensor | Sequence[float]
"""The contents of a message: a tensor, or numbers."""
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
Handler = Callable[[int, Any], None]
"""Function called as ``handler(source, message)`` on arrival of a registered message, which is a
``uint8`` tensor, or a sequence of floats for a handler of numbers."""
IdleUntil = Callable[[], "Sequence[Request] | None"]
"""Function that returns requests one of which must end before there is work; None: work now."""


class WaitSet:
    """Requests by name; :meth:`wait` returns the one that was completed first.

    Equivalent to the transport's ``wait_any`` over a list in which one request is replaced at a
    time. An engine may have its own set, whose waits do not examine every request.
    """

    def __init__(self, wait_any: Callable[[Sequence[Request], float | None], int]) -> None:
        self.requests: dict[int, Request] = {}
        self._wait_any = wait_any

    def put(self, name: int, request: Request) -> None:
        """Wait for ``request`` from now on, in place of the previous one of this name."""
        self.requests[name] = request

    def drop(self, name: int) -> None:
        """Stop waiting for the request of this name."""
        del self.requests[name]

    def ended(self) -> list[int]:
        """Return the names of the requests known to have ended."""
        return [name for name, request in self.requests.items() if request.done]

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait until one is done; return the name of the first, which stays until it is replaced.

        ``timeout`` in seconds replaces the transport's; if it expires, None is returned.

        Raises:
            PeerFailedError, WaitTimeoutError: see ``wait_any``.
        """
        first = self._wait_any(list(self.requests.values()), timeout)
        return None if first < 0 else list(self.requests)[first]


class Event(Protocol):
    """An event outside the transport, such as a CUDA event."""

    def query(self) -> bool:
        """Return whether the event has occurred."""


class Request:
    """An operation in progress.

    ``done`` is set when it has ended; ``source`` and ``nbytes`` then describe a received message,
    and ``order`` increases with every completion on this rank: the order of arrival. ``failed`` is
    the failed peer, if the operation ended because of its failure. ``numbers`` are the numbers
    sent, if an engine passes them directly instead of in ``buffer``.
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
        return f"<{self.what}: {'done' if self.done else 'pending'}>"


def numbers_of(receive: Request) -> Sequence[float]:
    """Return the numbers of a completed receive."""
    if receive.numbers is not None:
        return receive.numbers
    assert receive.buffer is not None
    numbers: list[float] = receive.buffer[: receive.nbytes // receive.buffer.itemsize].tolist()
    return numbers


def as_tensor(buffer: Sendable) -> Tensor:
    """Return a tensor unchanged, and numbers as a float64 tensor."""
    if isinstance(buffer, Tensor):
        return buffer
    # Takes half the time of torch.tensor(), and every message of a model has a header.
    data = bytearray(struct.pack(f"{len(buffer)}d", *buffer))
    return torch.frombuffer(data, dtype=torch.float64)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor of any dtype as a vector of bytes."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)  # its strides may not allow the view
    if is_plain(tensor):
        # The usual case, without further views, which take a microsecond each.
        return tensor if tensor.dtype == torch.uint8 else tensor.view(torch.uint8)
    return tensor.detach().view(-1).view(torch.uint8)


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is a vector without a gradient."""
    return tensor.dim() == 1 and not tensor.requires_grad


def first_done(requests: Sequence[Request]) -> int:
    """Return the index of the request that was completed first, or -1."""
    first = -1
    for index, request in enumerate(requests):
        if request.done and (first < 0 or request.order < requests[first].order):
            first = index
    return first


def reading_numbers(handler: Handler) -> Handler:
    """Return a handler of bytes that calls ``handler`` with the numbers in them."""
    return lambda source, message: handler(source, message.view(torch.float64).tolist())


@dataclass
class Traffic:
    """Running totals of one rank, in seconds and bytes.

    ``waiting`` is the time that this rank spent blocked in ``wait`` and ``wait_any``.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    waiting: float = 0.0


def primitive(method: F) -> F:
    """Mark a method that every engine implements and that a wrapper forwards.

    It is an abstract method except to type checkers: a wrapper's are defined at import
    (:mod:`.wrapper`). Methods without this mark are built on primitives.
    """
    return abstractmethod(method)


class PointToPoint(ABC):
    """Messages between two ranks.

    Buffers are contiguous CPU tensors of any dtype. They must not be changed between the call
    and the end of the request. Messages between two ranks with one tag arrive in sending order.
    A receive buffer may be larger than its message. Several receives may be posted for one
    (source, tag); they are filled in the order of posting.
    """

    traffic: Traffic
    needs_memory: bool
    """Whether buffers must have memory; otherwise "meta" tensors can be sent too."""
    progresses: bool
    """Whether messages progress, and are handled, while the rank computes."""

    @primitive
    def isend(self, buffer: Sendable, dest: int, tag: int, after: Event | None = None) -> Request:
        """Start to send all bytes of ``buffer``, once the event ``after``, if any, has occurred.

        Never blocks. Sends with one tag to one rank are sent in the order of the calls.

        Args:
            buffer: a tensor; or numbers, which are sent in float64 to a receive with room for at
                least as many, and which :func:`numbers_of` reads there.
            dest: the receiving rank.
            tag: tag of the message.
            after: event after which the buffer contains its values.
        """

    @primitive
    def irecv(self, buffer: Tensor, source: int, tag: int) -> Request:
        """Post a receive into ``buffer``. Never blocks."""

    @primitive
    def test(self, request: Request) -> bool:
        """Return whether ``request`` is done.

        Raises:
            PeerFailedError: it ended because its peer failed.
        """

    @primitive
    def wait_any(self, requests: Sequence[Request], timeout: float | None = None) -> int:
        """Wait until one is done; return the index of the one that was completed first.

        Requests that are already done count too. ``timeout`` in seconds replaces the
        transport's; if it expires, -1 is returned.

        Raises:
            PeerFailedError: the first to end ended because its peer failed.
            WaitTimeoutError: nothing ended within the transport's timeout.
        """

    def wait(self, *requests: Request) -> None:
        """Wait until all ``requests`` are done. Raises as :meth:`wait_any` does."""
        for request in requests:
            self.wait_any([request])

    def wait_set(self) -> WaitSet:
        """Return an empty set of requests to wait for repeatedly."""
        return WaitSet(self.wait_any)

    @primitive
    def cancel(self, request: Request) -> None:
        """Cancel a posted receive, unless a message has matched it."""

    @primitive
    def abandon(self, target: Request | range) -> None:
        """End operations that may never complete; their memory is not reused.

        Handlers may call it: waits for such requests end.

        Args:
            target: a send or a receive; or a range of tags of a revoked group, whose sends and
                receives all end and whose messages are no longer handled.
        """

    @primitive
    def exclude_from_traffic(self, *tags: int) -> None:
        """Exclude messages with these tags from ``traffic``; simulated ones use no bandwidth.

        For messages that only measure a run. The sender must call it before sending the first.
        """

    @primitive
    def on_message(
        self, tag: int, nbytes: int, handler: Handler, *, as_numbers: bool = False
    ) -> None:
        """Call ``handler`` for every message with ``tag``, even while the rank computes.

        The handlers of one rank run one at a time, never inside :meth:`atomic` of another thread
        of the rank. They must not wait; they may call :meth:`isend` and :meth:`Clock.now`.

        Args:
            tag: tag of the messages.
            nbytes: size of the longest message.
            handler: called with the source and the message, a ``uint8`` tensor that is reused
                after the handler returns.
            as_numbers: pass the numbers given to :meth:`isend` instead.
        """

    @primitive
    def atomic(self) -> AbstractContextManager[None]:
        """Return a section during which no handler of this rank runs."""

    @primitive
    def when_done(self, operation: Request | Event, action: Callable[[], None]) -> None:
        """Call ``action`` once, as a handler, soon after ``operation`` has ended.

        Also while the rank computes, so that a collective can follow another one or a copy from a
        device: unlike other handlers it may start collectives. ``operation`` may have ended
        already, or may end because its peer failed.
        """


class Collectives(ABC):
    """Operations that all ranks call in the same order."""

    has_collectives: bool
    """Whether the engine's collectives are available; they need all ranks of the job."""

    @primitive
    def ibarrier(self) -> Request:
        """Start a barrier, done once every rank has called it."""

    @primitive
    def ibroadcast(self, buffer: Tensor, root: int) -> Request:
        """Copy ``buffer`` of ``root`` to all ranks."""

    @primitive
    def iallreduce(self, buffer: Tensor, total: Tensor | None = None) -> Request:
        """Write the sum of ``buffer`` over all ranks to ``total``; fp32, fp64 or int64.

        Args:
            buffer: must not be changed before the request is done; its contents are undefined
                then, if ``total`` is given.
            total: tensor of the same length and dtype, which saves MPI a copy; None: ``buffer``.

        Raises:
            TypeError: for half precision, which MPI does not sum correctly.
        """

    @primitive
    def iallgather(self, buffer: Tensor, gathered: Tensor) -> Request:
        """Collect all ranks' ``buffer`` in rank order; ``gathered`` is ``size`` times as long."""

    @primitive
    def ialltoall(self, buffer: Tensor, received: Tensor) -> Request:
        """Send the i-th of ``size`` equal parts to rank i, and receive likewise."""


class Clock(ABC):
    """Real or simulated (virtual) time."""

    models_time: bool
    """Whether time is virtual: messages and ``sleep`` take time, and computing takes none."""

    @primitive
    def now(self) -> float:
        """Return the seconds since the transport started."""

    @primitive
    def sleep(self, seconds: float = 0.0, *, until: float | None = None) -> None:
        """Let time pass as during computation: messages move at the same time.

        Args:
            seconds: duration.
            until: sleep until ``now()`` has this value instead; exactly this in simulations.
        """


class FailureDetector(ABC):
    """Failed ranks, and callbacks for failures."""

    survives: bool
    """Whether surviving ranks are notified of a failure and can continue."""

    @property
    @primitive
    def failed(self) -> frozenset[int]:
        """The ranks known to have failed, including excluded ones."""

    @property
    @primitive
    def excluded(self) -> frozenset[int]:
        """The ranks in ``failed`` that may still run, but whose heartbeat has timed out."""

    @primitive
    def exclude(self, rank: int) -> None:
        """Treat ``rank`` as failed from now on, although it may still run.

        No messages are exchanged with it any more. All other ranks must exclude it too.
        """

    @primitive
    def on_failure(self, action: Callable[[int], None]) -> None:
        """Call ``action``, as a handler, with every rank that fails from now on.

        By then, operations with that rank have ended with :class:`PeerFailedError`, as have all
        collectives, which need all ranks.
        """

    @primitive
    def is_revoked(self, without: int | None = None) -> bool:
        """Return whether a rank needed by this transport has failed, so that every wait ends.

        Args:
            without: a rank; return whether its failure would revoke this transport, after which
                the surviving ranks form a new group (see :mod:`.group`).
        """


class SideChannel(Protocol):
    """A channel between excluded ranks and the others, and the end of an exclusion."""

    def post(self, message: bytes, dest: int) -> None:
        """Send a short message to any rank; it is lost if the rank has failed."""

    def read(self, source: int) -> bytes | None:
        """Return the next message that has arrived from a rank, or None. Never blocks."""

    def failed(self) -> set[int]:
        """Return the ranks that have failed, also after they were excluded."""

    def readmit(self, rank: int) -> None:
        """Exclude ``rank`` no more, unless it has failed. All other ranks must do the same.

        Messages sent to it or by it before its exclusion may still arrive.
        """


class Transport(PointToPoint, Collectives, Clock, FailureDetector):
    """One rank's connection to the other ranks."""

    rank: int
    size: int
    host: int
    """The index of this rank's host."""
    hosts: Sequence[int]
    """For every rank the index of its host."""
    host_names: Sequence[str]
    """For every rank the name of its host."""
    original_ranks: Sequence[int]
    """For every rank its number in the job, as shown to users."""
    engine: str
    """``"mpi"`` or ``"virtual"``, for reports; the other attributes describe capabilities."""
    shares_process: bool
    """Whether all ranks are in one process, with one set of signals, random states and devices."""
    simulation: Simulation | None
    """Operations that only a simulation has; None over MPI."""
    meets: bool
    """Whether all ranks are in the simulation and can call :meth:`Simulation.meet`."""
    poll_hooks: PollHooks | None
    """Functions called after each poll; None if the engine does not poll."""
    side_channel: SideChannel | None
    """By which excluded ranks can return; None if they cannot."""

    @primitive
    def close(self, status: int = 0) -> None:
        """Complete or cancel operations in progress, and stop. Every rank has to call it once.

        ``status`` is the exit status of the program, which ends after it.
        """


# -- specific to one engine ------------------------------------------------------------------
class Simulation(Protocol):
    """Operations of ranks that share a process and a virtual clock."""

    def meet(self, fact: Any) -> list[Any]:
        """Return all ranks' ``fact`` by rank, once all have called it; no messages, no time."""

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Call ``make`` on the first rank with this key; return its result on all ranks."""

    def charge_memory(self, nbytes: int) -> None:
        """Let the time pass for reading or writing ``nbytes`` of a message in memory."""

    def sleep_between(
        self,
        moments: Sequence[float],
        action: Callable[[int], None],
        idle_until: IdleUntil | None = None,
    ) -> None:
        """Implement :func:`sleep_between` for simulations."""

    def reseed(self, *key: int) -> None:
        """Reset the random numbers of all ranks from the seed and ``key``."""


class PollHooks(Protocol):
    """Functions that check for events outside the transport, such as signals."""

    def watch(self, look: Callable[[], None]) -> None:
        """Call ``look`` after each poll, also while the rank computes.

        Any thread may call it. It must be fast, and may do anything that a handler may.
        """

    def unwatch(self, look: Callable[[], None]) -> None:
        """Stop calling ``look``."""


def once(transport: Transport, key: Hashable, make: Callable[[], T]) -> T:
    """Return ``make()``, called once for all ranks that share a process."""
    return make() if transport.simulation is None else transport.simulation.once(key, make)


def meet(transport: Transport, fact: Any) -> list[Any] | None:
    """Return all ranks' ``fact`` by rank, without messages or time; None if not supported."""
    if transport.simulation is None or not transport.meets:
        return None
    return transport.simulation.meet(fact)


def charge_memory(transport: Transport, nbytes: int) -> None:
    """Charge simulated time for accessing ``nbytes`` in memory; no-op in real time."""
    if transport.simulation is not None:
        transport.simulation.charge_memory(nbytes)


def sleep_between(
    transport: Transport,
    moments: Sequence[float],
    action: Callable[[int], None],
    idle_until: IdleUntil | None = None,
) -> None:
    """Call ``action(i)`` at the i-th of ``moments``, or at once if that is past.

    The rank sleeps between calls. ``action`` has no restrictions; calls may be skipped until
    one of the requests returned by ``idle_until`` has ended.
    """
    if transport.simulation is not None:
        transport.simulation.sleep_between(moments, action, idle_until)
    else:
        sleep_and_call(transport, moments, action)


def sleep_and_call(clock: Clock, moments: Sequence[float], action: Callable[[int], None]) -> None:
    """Call ``action(i)`` at the i-th of ``moments``, with one sleep for each."""
    for index, moment in enumerate(moments):
        clock.sleep(max(0.0, moment - clock.now()))
        action(index)


# -- built on the primitives --------------------------------------------------------------------
def wait_ended(transport: PointToPoint, requests: Iterable[Request]) -> None:
    """Wait until all have ended, including by a peer's failure."""
    for request in requests:
        with suppress(PeerFailedError):
            transport.wait(request)


def await_event(clock: Clock, event: Event) -> None:
    """Wait until ``event`` has occurred; messages move at the same time."""
    while not event.query():
        clock.sleep(EVENT_POLL)


def surviving_ranks(transport: Transport) -> list[int]:
    """Return the ranks that are not known to have failed."""
    failed = transport.failed
    return [rank for rank in range(transport.size) if rank not in failed]


def survivors_from(transport: Transport, first: int) -> int:
    """Return the number of ranks from ``first`` on that are not known to have failed."""
    return transport.size - first - sum(rank >= first for rank in transport.failed)
