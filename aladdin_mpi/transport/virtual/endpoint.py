"""One rank's connection to the others in a simulation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from greenlet import greenlet
from torch import Tensor

from aladdin_mpi.errors import PeerFailedError
from aladdin_mpi.options.cluster import Cluster, Pauses
from aladdin_mpi.transport import collectives
from aladdin_mpi.transport.base import (
    ANY_SOURCE,
    Event,
    Handler,
    IdleUntil,
    Request,
    Sendable,
    Simulation,
    Traffic,
    Transport,
    WaitSet,
    first_done,
    sleep_and_call,
)
from aladdin_mpi.transport.collectives import Channel, HostByHost, Steps
from aladdin_mpi.transport.virtual.callbacks import ScheduledCallbacks
from aladdin_mpi.transport.virtual.fiber import LATE, Fiber, VirtualClock
from aladdin_mpi.transport.virtual.messages import (
    Collective,
    Mailbox,
    Message,
    Operation,
    Payload,
    VirtualWaitSet,
    copied,
    fill,
    handed,
    handed_numbers,
    too_long,
)
from aladdin_mpi.transport.virtual.network import Network, TcpNetwork

EAGER = 64 * 1024
"""Largest message that is copied at once, so that its send is done; a longer send is done when it
has been received, as in MPI's rendezvous protocol."""
EVENT_POLL = 10e-6
"""Simulated seconds between two polls of an event."""

T = TypeVar("T")


class Meeting:
    """A meeting at which ``size`` ranks exchange facts."""

    def __init__(self, size: int) -> None:
        self.facts: list[Any] = [None] * size
        self.missing = size
        self.waiting: list[tuple[VirtualTransport, Attendance]] = []


class Attendance(Request):
    """One rank's wait at a meeting."""

    waiter = None


class Fabric:
    """All ranks' transports and the network between them.

    Args:
        may_fail: whether ranks may fail or be excluded.
    """

    def __init__(self, cluster: Cluster, size: int, clock: VirtualClock, may_fail: bool) -> None:
        self.clock = clock
        network = TcpNetwork if cluster.sharing == "tcp" else Network
        self.network = network(cluster, size, clock, self._deliver)
        self.in_order = HostByHost(self.network.hosts)
        self.host_names = [str(host) for host in self.network.hosts]
        self.failed: frozenset[int] = frozenset()
        self.excluded: frozenset[int] = frozenset()
        self.may_fail = may_fail
        # A pause delays messages and everything that depends on them.
        self.meets = not (may_fail or cluster.pauses)
        self.meetings: dict[int, Meeting] = {}
        """Meetings at which some ranks are still missing."""
        self.known: dict[Hashable, Any] = {}
        """Results of :meth:`Simulation.once`."""
        is_free = not (cluster.memory_gbyte or cluster.handling_us)
        self.handling = None if is_free else cluster.handling
        self.exclude: Callable[[int], None] = self.remove
        """Excludes a rank; the engine's."""
        self.callers: list[greenlet] = []
        """Free callers, see :class:`ScheduledCallbacks`."""
        self.transports = [
            VirtualTransport(self, rank, size, cluster.pauses_of(rank)) for rank in range(size)
        ]

    def _deliver(self, message: Message) -> None:
        if self.failed and (message.source in self.failed or message.dest in self.failed):
            return
        self.transports[message.dest]._arrived(message)

    def remove(self, rank: int) -> None:
        """Let ``rank`` fail: its undelivered messages are lost, and all others are notified."""
        self.failed |= {rank}
        failed = self.transports[rank]
        for transport in self.transports:
            transport._keep_delivered(rank)
        lost = self.network.drop(rank) + failed._mailbox.unexpected()
        failed.fiber.kill()
        for message in lost:
            if message.request is not None and message.source != rank:
                self.transports[message.source]._fail(message.request, rank)
        for transport in self.transports:
            if transport.rank not in self.failed:
                transport._peer_failed(rank)


class VirtualTransport(Transport):
    """One rank's connection to the others in a simulation.

    Only ``sleep`` and waits block. "meta" tensors are sent as sizes without data. A message of more
    than 64 KiB is read from its buffer when it is received, which completes its send.
    """

    engine = "virtual"
    models_time = shares_process = True
    needs_memory = False
    has_collectives = progresses = True
    poll_hooks = side_channel = None

    def __init__(self, fabric: Fabric, rank: int, size: int, pauses: Pauses) -> None:
        self.rank = rank
        self.size = size
        self.traffic = Traffic()
        self.hosts = fabric.network.hosts
        self.host = self.hosts[rank]
        self.host_names = fabric.host_names
        self.original_ranks = range(size)
        self.survives = fabric.may_fail
        self.meets = fabric.meets
        self.simulation: Simulation | None = self
        self.fiber = Fiber(rank, fabric.clock, pauses, self.traffic)
        self._fabric = fabric
        self._clock = fabric.clock
        self._mailbox = Mailbox()
        self._untracked: frozenset[int] = frozenset()
        self._on_failure: list[Callable[[int], None]] = []
        self._handlers: dict[int, tuple[int, Handler, Callable[[Message], Any]]] = {}
        """The largest message, the handler, and the function that reads the message, by tag."""
        self._held: dict[tuple[int, int], deque[tuple[Message, Operation, Event | None]]] = {}
        """Sends that wait for an event, by receiver and tag."""
        self._collectives: dict[Collective, None] = {}
        """Collectives in progress, in the order of their start."""
        self._collective_calls = 0
        self._meetings = 0
        self._when_done: dict[Request, list[Callable[[], None]]] = {}
        self._completions = 0

    # -- simulation only ----------------------------------------------------
    def meet(self, fact: Any) -> list[Any]:
        number, meetings = self._meetings, self._fabric.meetings
        self._meetings += 1
        meeting = meetings.setdefault(number, Meeting(self.size))
        meeting.facts[self.rank] = fact
        meeting.missing -= 1
        if meeting.missing:
            attendance = Attendance("meeting")
            meeting.waiting.append((self, attendance))
            self.fiber.wait([attendance], None)
        else:
            del meetings[number]
            for transport, attendance in meeting.waiting:
                transport._complete(attendance)
        return meeting.facts

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        known = self._fabric.known
        if key not in known:
            known[key] = make()
        value: T = known[key]
        return value

    def charge_memory(self, nbytes: int) -> None:
        handling = self._fabric.handling
        if handling is not None and (seconds := handling(nbytes)):
            self.fiber.sleep(seconds)

    def sleep_between(
        self,
        moments: Sequence[float],
        action: Callable[[int], None],
        idle_until: IdleUntil | None = None,
    ) -> None:
        # The rank itself is resumed after the last moment.
        if self.fiber.allows_callbacks and moments:
            callers = self._fabric.callers
            ScheduledCallbacks(self.fiber, callers, moments, action, idle_until).make()
        else:
            sleep_and_call(self, moments, action)

    def reseed(self, *key: int) -> None:
        """Reset the random numbers of all ranks from the seed and ``key``.

        A run that starts at this time and calls it with the same key continues with the same
        events. Call it when no message is in flight; the last call wins.
        """
        self._clock.reseed(*key)

    def carried(self) -> dict[str, list[int]]:
        """Return :meth:`Network.carried`: bytes by host for "out", "in" and "local"."""
        return self._fabric.network.carried()

    # -- time ---------------------------------------------------------------
    def now(self) -> float:
        return self._clock.now

    def sleep(self, seconds: float = 0.0, *, until: float | None = None) -> None:
        if until is not None:
            self.fiber.sleep_until(max(until, self._clock.now))
            return
        if not seconds >= 0:
            raise ValueError(f"sleep: expected 0 seconds or more, got {seconds}")
        self.fiber.sleep(seconds)

    # -- sending --------------------------------------------------------------
    def isend(self, buffer: Sendable, dest: int, tag: int, after: Event | None = None) -> Request:
        # ``after`` is queried every 10 virtual microseconds; numbers need no tensor.
        self._check(dest, tag)
        if isinstance(buffer, Tensor):
            return self._send(buffer, _nbytes(buffer), dest, tag, after)
        numbers = tuple(map(float, buffer))
        return self._send(numbers, 8 * len(numbers), dest, tag, after)

    def _check(self, peer: int, tag: int = 0) -> None:
        if not 0 <= peer < self.size:
            raise ValueError(f"expected a rank from 0 to {self.size - 1}, got {peer}")
        if tag < 0:
            raise ValueError(f"expected a tag of 0 or more, got {tag}")

    def _send(
        self, payload: Payload, nbytes: int, dest: int, tag: int, after: Event | None = None
    ) -> Operation:
        buffer = None
        if isinstance(payload, Tensor):
            buffer = payload
            if payload.is_meta or not nbytes:
                payload = None  # only a size
        request = Operation("send", buffer, dest, tag, nbytes)
        message = Message(self.rank, dest, tag, nbytes, payload, request, tag in self._untracked)
        if after is None and not self._held:
            self._launch(message, request)
        else:
            self._hold(message, request, after)
        return request

    def _launch(self, message: Message, request: Operation) -> None:
        fabric, nbytes = self._fabric, message.nbytes
        if not message.free:
            self.traffic.bytes_sent += nbytes
            self.traffic.messages_sent += 1
        if fabric.failed and (self.rank in fabric.failed or message.dest in fabric.failed):
            self._fail(request, self.rank if self.rank in fabric.failed else message.dest)
            return
        if nbytes <= EAGER:
            message.payload = copied(message.payload)
            message.request = None
            self._complete(request)
        fabric.network.send(message)

    def _hold(self, message: Message, request: Operation, after: Event | None) -> None:
        """Send after the event ``after`` and after held messages with this tag to this rank."""
        key = (message.dest, message.tag)
        if key in self._held:
            self._held[key].append((message, request, after))
        elif after is None or after.query():
            self._launch(message, request)
        else:
            self._held[key] = deque([(message, request, after)])
            self._clock.at(self._clock.now + EVENT_POLL, self._release, key)

    def _release(self, key: tuple[int, int]) -> None:
        queue = self._held.get(key)
        while queue:
            message, request, after = queue[0]
            if after is not None and not after.query():
                self._clock.at(self._clock.now + EVENT_POLL, self._release, key)
                return
            queue.popleft()
            self._launch(message, request)
        self._held.pop(key, None)

    def exclude_from_traffic(self, *tags: int) -> None:
        self._untracked |= set(tags)

    # -- receiving ------------------------------------------------------------
    def irecv(self, buffer: Tensor, source: int, tag: int) -> Request:
        self._check(0 if source == ANY_SOURCE else source, tag)
        return self._receive(buffer, _nbytes(buffer), source, tag)

    def _receive(self, buffer: Tensor | None, nbytes: int, source: int, tag: int) -> Operation:
        receive = Operation("receive", buffer, source, tag, nbytes)
        message = self._mailbox.take(source, tag)
        if message is not None:
            self._accept(receive, message)
        elif source in self._fabric.failed:
            self._fail(receive, source)
        else:
            self._mailbox.post(receive)
        return receive

    def _arrived(self, message: Message) -> None:
        """Receive ``message``, whose last byte has arrived."""
        if message.tag in self._handlers:
            self._handle(message)
            return
        receive = self._mailbox.match(message)
        if receive is None:
            self._mailbox.keep(message)
        else:
            self._accept(receive, message)

    def _accept(self, receive: Operation, message: Message) -> None:
        fill(receive, message)
        self._complete(receive)
        self._taken(message)

    def _taken(self, message: Message) -> None:
        """Count a message that has left the network, and end its send."""
        if not message.free:
            self.traffic.bytes_received += message.nbytes
            self.traffic.messages_received += 1
        if message.request is not None and not message.request.done:  # not abandoned
            self._fabric.transports[message.source]._complete(message.request)

    # -- message handlers ---------------------------------------------------
    def on_message(
        self, tag: int, nbytes: int, handler: Handler, *, as_numbers: bool = False
    ) -> None:
        # Handlers run before any rank continues at that time.
        self._check(self.rank, tag)
        self._handlers[tag] = nbytes, handler, handed_numbers if as_numbers else handed
        while (message := self._mailbox.take(ANY_SOURCE, tag)) is not None:
            self._handle(message)

    def _handle(self, message: Message) -> None:
        nbytes, handler, read = self._handlers[message.tag]
        if message.nbytes > nbytes:
            raise too_long(message, nbytes)
        with self.fiber.handler:
            handler(message.source, read(message))
        self._taken(message)

    def atomic(self) -> AbstractContextManager[None]:
        # Nothing else runs until a wait, which is refused inside.
        return self.fiber.atomic

    # -- the end of a request ---------------------------------------------------
    def test(self, request: Request) -> bool:
        # No time passes: a loop that only tests never ends.
        if request.failed is not None:
            raise PeerFailedError(request.failed, self.host_names[request.failed])
        return request.done

    def wait(self, *requests: Request) -> None:
        for request in requests:
            if not request.done or request.failed is not None:
                self.wait_any([request])

    def wait_any(self, requests: Sequence[Request], timeout: float | None = None) -> int:
        # Without ``timeout`` only a deadlock ends the wait.
        if not requests:
            raise ValueError("wait_any: expected one request or more, got none")
        first = first_done(requests)
        if first < 0:
            ended = self.fiber.wait(requests, timeout)
            if ended is None:
                return -1
            first = requests.index(ended)
        if requests[first].failed is not None:
            self.test(requests[first])
        return first

    def wait_set(self) -> WaitSet:
        return VirtualWaitSet(self.fiber, self.host_names)

    def _complete(self, request: Operation | Collective | Attendance) -> None:
        """Mark ``request`` done, and notify its waiter."""
        request.done = True
        self._completions += 1
        request.order = self._completions
        waiter = request.waiter
        if waiter is not None:
            waiter.operation_done(request)
        elif self.fiber.waiting is not None:
            self.fiber.notify(request)
        if self._when_done:
            for action in self._when_done.pop(request, ()):
                self._call_soon(action)

    def _fail(self, request: Operation | Collective, rank: int) -> None:
        """End ``request`` because ``rank`` has failed."""
        request.failed = rank
        self._complete(request)

    def cancel(self, request: Request) -> None:
        # The request is then done, with ``nbytes`` 0.
        if isinstance(request, Operation) and self._mailbox.withdraw(request):
            self._complete(request)

    def abandon(self, target: Request | range) -> None:
        # Messages that have been sent are delivered nevertheless.
        if isinstance(target, range):
            self._abandon_tags(target)
        elif isinstance(target, Operation) and not target.done:
            if target.what == "receive":
                self._mailbox.withdraw(target)
            self._complete(target)

    def _abandon_tags(self, tags: range) -> None:
        for tag in [tag for tag in self._handlers if tag in tags]:
            del self._handlers[tag]
        for key in [key for key in self._held if key[1] in tags]:
            del self._held[key]
        for receive in self._mailbox.withdraw_where(lambda source, tag: tag in tags):
            self._complete(receive)

    def when_done(self, operation: Request | Event, action: Callable[[], None]) -> None:
        # No simulated time passes between a request's end and the action.
        if not isinstance(operation, Request):
            self._look_for((operation, action))
        elif operation.done:
            self._call_soon(action)
        else:
            self._when_done.setdefault(operation, []).append(action)

    def _look_for(self, awaited: tuple[Event, Callable[[], None]]) -> None:
        event, action = awaited
        if event.query():
            self._call_soon(action)
        else:
            self._clock.at(self._clock.now + EVENT_POLL, self._look_for, awaited)

    def _call_soon(self, action: Callable[[], None]) -> None:
        # As an event, since a request may end while another rank runs.
        self._clock.at(self._clock.now, self._call, action, LATE)

    def _call(self, action: Callable[[], None]) -> None:
        if not self.fiber.ended:
            with self.fiber.handler:
                action()

    # -- collectives: every rank calls them in the same order ----------------
    def _collective(
        self, what: str, algorithm: Callable[..., Steps], *arguments: object
    ) -> Request:
        # Tags below 0 are for collectives, one each, as collectives may overlap.
        tag = -2 - self._collective_calls
        self._collective_calls += 1
        channel = Channel(
            self.rank,
            self.size,
            lambda dest, part: self._send(*part, dest, tag),
            lambda source, part: self._receive(*part, source, tag),
        )
        collective = Collective(what, algorithm(channel, *arguments), self._resume, self._finish)
        if self._fabric.failed:
            self._fail(collective, min(self._fabric.failed))
        else:
            self._collectives[collective] = None
            collective.advance()
        return collective

    def _resume(self, collective: Collective) -> None:
        # As an event, so that one rank's step never runs inside another's. A pause still applies,
        # since the network holds the rank's messages.
        self._clock.at(self._clock.now, Collective.advance, collective, LATE)

    def _finish(self, collective: Collective) -> None:
        del self._collectives[collective]
        self._complete(collective)

    def ibarrier(self) -> Request:
        return self._collective("barrier", collectives.barrier)

    def ibroadcast(self, buffer: Tensor, root: int) -> Request:
        self._check(root)
        _nbytes(buffer)
        return self._collective("broadcast", collectives.broadcast, buffer, root)

    def iallreduce(self, buffer: Tensor, total: Tensor | None = None) -> Request:
        # The ring goes from host to host.
        _nbytes(buffer)
        collectives.check_reducible(buffer)
        if total is None:
            total = buffer
        elif not total.is_meta:
            total.copy_(buffer)
        return self._collective("all-reduce", self._allreduce, total)

    def _allreduce(self, channel: Channel, total: Tensor) -> Steps:
        return collectives.allreduce(self._fabric.in_order(channel), total)

    def iallgather(self, buffer: Tensor, gathered: Tensor) -> Request:
        expected = _nbytes(buffer) * self.size
        if _nbytes(gathered) != expected:
            raise ValueError(
                f"iallgather: expected gathered of {expected} bytes, got {gathered.nbytes}; "
                f"make it {self.size} times as long as buffer"
            )
        return self._collective("all-gather", collectives.allgather, buffer, gathered)

    def ialltoall(self, buffer: Tensor, received: Tensor) -> Request:
        if _nbytes(received) != _nbytes(buffer) or buffer.nbytes % self.size:
            raise ValueError(
                f"ialltoall: expected two buffers of one length, a multiple of {self.size} bytes, "
                f"got {buffer.nbytes} and {received.nbytes} bytes"
            )
        return self._collective("all-to-all", collectives.alltoall, buffer, received)

    # -- failure and end ------------------------------------------------------
    @property
    def failed(self) -> frozenset[int]:
        return self._fabric.failed

    @property
    def excluded(self) -> frozenset[int]:
        return self._fabric.excluded

    def exclude(self, rank: int) -> None:
        self._fabric.exclude(rank)

    def on_failure(self, action: Callable[[int], None]) -> None:
        # All ranks are notified at the time of a failure.
        self._on_failure.append(action)

    def is_revoked(self, without: int | None = None) -> bool:
        return False  # a failed rank ends only the waits for it

    def _peer_failed(self, rank: int) -> None:
        """End operations that need the failed ``rank``; collectives need every rank."""
        for collective in list(self._collectives):
            for operation in collective.pending:
                self._mailbox.withdraw(operation)
            collective.steps = iter(())
            del self._collectives[collective]
            self._fail(collective, rank)
        for receive in self._mailbox.withdraw_where(lambda source, tag: source == rank):
            self._fail(receive, rank)
        for key in [key for key in self._held if key[0] == rank]:
            for _, request, _ in self._held.pop(key):
                self._fail(request, rank)
        if not self.fiber.ended:
            with self.fiber.handler:
                for action in self._on_failure:
                    action(rank)

    def _keep_delivered(self, rank: int) -> None:
        """Copy messages that have arrived in full from ``rank``, whose buffers may change."""
        for message in self._mailbox.unexpected():
            if message.source == rank and message.request is not None:
                message.request = None
                message.payload = copied(message.payload)

    def close(self, status: int = 0) -> None:
        # Sends in flight still arrive.
        self._handlers.clear()
        for receive in self._mailbox.withdraw_where(lambda source, tag: True):
            self._complete(receive)


def _nbytes(buffer: Tensor) -> int:
    """Return the size of a buffer, after checking that it can be sent or received."""
    if not (buffer.is_meta or buffer.is_cpu) or not buffer.is_contiguous():
        raise ValueError(
            f"expected a contiguous tensor on the CPU, got shape {tuple(buffer.shape)} with "
            f"strides {buffer.stride()} on {buffer.device}; copy it first"
        )
    return buffer.nbytes
