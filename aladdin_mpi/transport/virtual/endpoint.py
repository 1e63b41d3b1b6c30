"""Where messages start and end in virtual time: one endpoint for each rank."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any, cast

import torch
from greenlet import greenlet
from torch import Tensor

from aladdin_mpi.errors import PeerFailedError
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.transport.base import (
    ANY_SOURCE,
    Event,
    Handler,
    Request,
    Traffic,
    WaitSet,
)
from aladdin_mpi.transport.collectives import HostByHost, Part, Steps
from aladdin_mpi.transport.virtual.fiber import LATE, Fiber, VirtualClock
from aladdin_mpi.transport.virtual.messages import (
    Mailbox,
    Message,
    Operation,
    as_bytes,
    copied,
    fill,
    in_memory,
    too_long,
)
from aladdin_mpi.transport.virtual.network import Network, TcpNetwork


class VirtualWaitSet(WaitSet):
    """A set whose requests tell it when they are done.

    A server of a thousand workers takes millions of messages: a wait must not cost more
    where there are more workers. Its requests must not be waited for elsewhere.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.requests: dict[int, Request] = {}
        self._endpoint = endpoint
        self._done: list[tuple[int, int, Request]] = []
        self._shown = _Shown(self.requests)

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
        merged = self.requests.get(name)
        if isinstance(merged, Operation):
            merged.waiter = None

    def operation_done(self, operation: Request) -> None:
        """One of the requests is done: note it, and wake the rank if it waits for that."""
        assert isinstance(operation, Operation)
        heapq.heappush(self._done, (operation.order, operation.name, operation))
        self._endpoint.fiber.news(self._shown)

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
                        host = self._endpoint.fabric.host_names[request.failed]
                        raise PeerFailedError(request.failed, host)
                    return name
                heapq.heappop(self._done)  # has been replaced since
            self._endpoint.fiber.wait_for_news(self._shown)


class _Shown(Collection[Request]):
    """What a rank that waits for a set is seen to wait for.

    It contains nothing, so that no request is looked for in it: they tell the set.
    """

    def __init__(self, requests: dict[int, Request]) -> None:
        self._requests = requests

    def __contains__(self, request: object) -> bool:
        return False

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __len__(self) -> int:
        return len(self._requests)


class Collective(Request):
    """The ``number``-th collective of one rank, under way.

    ``resume`` is called to have the engine call :meth:`advance`, ``finish`` at the end.
    """

    __slots__ = ("_finish", "_missing", "_resume", "_steps", "number", "pending")

    waiter = None

    def __init__(
        self,
        what: str,
        number: int,
        steps: Steps,
        resume: Callable[[Collective], None],
        finish: Callable[[Collective], None],
    ) -> None:
        super().__init__(what)
        self.number = number
        self._steps = steps
        self._resume = resume
        self._finish = finish
        self._missing = 0
        self.pending: Sequence[Operation] = ()

    def advance(self) -> None:
        """Go on as far as no operation is awaited."""
        if self.done:
            return
        for operations in self._steps:
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

    def abandon(self) -> None:
        """Stop for good."""
        self._steps = iter(())


EAGER = 64 * 1024
"""Messages up to so many bytes are copied at once and their send is done; a longer one
is done when it has been received, as MPI's rendezvous."""
EVENT_POLL = 10e-6
"""Virtual seconds between two looks at an event that something waits for."""


class Fabric:
    """All endpoints and the network between them.

    Args:
        may_fail: whether ranks may die, or be excluded.
    """

    def __init__(self, cluster: Cluster, size: int, clock: VirtualClock, may_fail: bool) -> None:
        self.clock = clock
        network = TcpNetwork if cluster.sharing == "tcp" else Network
        self.network = network(cluster, size, clock, self._deliver)
        self.in_order = HostByHost(self.network.hosts)
        self.host_names = [str(host) for host in self.network.hosts]
        self.dead: frozenset[int] = frozenset()
        self.excluded: frozenset[int] = frozenset()
        self.may_fail = may_fail
        # A pause holds messages back, and what follows them.
        self.meets = not (may_fail or cluster.pauses)
        self.meetings: dict[int, Meeting] = {}
        """Those at which some ranks have not come yet."""
        self.known: dict[Hashable, Any] = {}
        """See :meth:`Simulation.once`."""
        is_free = not (cluster.memory_gbyte or cluster.handling_us)
        self.handling = None if is_free else cluster.handling
        self.callers: list[greenlet] = []
        """Those that call for ranks and are free: see :class:`ScheduledCallbacks`."""
        self.endpoints = [Endpoint(self, cluster, rank, size) for rank in range(size)]

    def _deliver(self, message: Message) -> None:
        if self.dead and (message.source in self.dead or message.dest in self.dead):
            return
        self.endpoints[message.dest].arrived(message)

    def remove(self, rank: int) -> None:
        """Let ``rank`` die: what it has sent and not delivered is lost, and all are told."""
        self.dead |= {rank}
        for endpoint in self.endpoints:
            endpoint.keep_delivered(rank)
        lost = self.network.drop(rank) + self.endpoints[rank].mailbox.unexpected()
        self.endpoints[rank].fiber.kill()
        for message in lost:
            if message.request is not None and message.source != rank:
                self.endpoints[message.source].fail(message.request, rank)
        for endpoint in self.endpoints:
            if endpoint.rank not in self.dead:
                endpoint.peer_died(rank)


class Meeting:
    """Where ranks wait for each other: what each of ``size`` brings."""

    def __init__(self, size: int) -> None:
        self.facts: list[Any] = [None] * size
        self.missing = size
        self.waiting: list[tuple[Endpoint, Attendance]] = []


class Attendance(Request):
    """One rank's wait at a meeting."""

    __slots__ = ()
    waiter = None


class Endpoint:
    """What one rank has posted, holds back and handles. Nothing here blocks."""

    def __init__(self, fabric: Fabric, cluster: Cluster, rank: int, size: int) -> None:
        self.fabric = fabric
        self.rank = rank
        self.size = size
        self.traffic = Traffic()
        self.mailbox = Mailbox()
        self.untracked: frozenset[int] = frozenset()
        self.fiber = Fiber(rank, fabric.clock, cluster.pauses_of(rank), self.traffic)
        self.on_failure: list[Callable[[int], None]] = []
        self._handlers: dict[int, tuple[int, Callable[[Message], None]]] = {}
        """By tag: the most bytes, and what takes the message."""
        self._held: dict[tuple[int, int], deque[tuple[Message, Event | None]]] = {}
        self._collectives: dict[int, Collective] = {}
        self._collective_calls = 0
        self._meetings = 0
        self._when_done: dict[Request, list[Callable[[], None]]] = {}
        self._completions = 0

    # -- the end of a request ---------------------------------------------------
    def complete(self, request: Operation | Collective | Attendance) -> None:
        """Mark ``request`` done, and wake who waits for it."""
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

    def when_done(self, request: Request, action: Callable[[], None]) -> None:
        """Have ``action`` called at the time at which ``request`` ends; see :class:`Transport`."""
        if request.done:
            self._call_soon(action)
        else:
            self._when_done.setdefault(request, []).append(action)

    def when_happened(self, event: Event, action: Callable[[], None]) -> None:
        """Have ``action`` called soon after ``event``; see :class:`Transport`."""
        self._look_for((event, action))

    def _look_for(self, awaited: tuple[Event, Callable[[], None]]) -> None:
        event, action = awaited
        if event.query():
            self._call_soon(action)
        else:
            self.fabric.clock.at(self.fabric.clock.now + EVENT_POLL, self._look_for, awaited)

    def _call_soon(self, action: Callable[[], None]) -> None:
        # As an event: a request may end inside what another rank does.
        self.fabric.clock.at(self.fabric.clock.now, self._call, action, LATE)

    def _call(self, action: Callable[[], None]) -> None:
        if not self.fiber.ended:
            with self.fiber.handler():
                action()

    def fail(self, request: Operation | Collective, dead: int) -> None:
        """End ``request`` because the rank ``dead`` has died."""
        request.failed = dead
        self.complete(request)

    # -- sending ------------------------------------------------------------------
    def send(
        self, buffer: Tensor | None, nbytes: int, dest: int, tag: int, after: Event | None = None
    ) -> Operation:
        """Start to send; see :meth:`Transport.isend`. ``buffer`` None or "meta" is a bare size."""
        request = Operation("send", buffer, dest, tag, nbytes)
        data = None if buffer is None or buffer.is_meta or not nbytes else buffer
        message = Message(self.rank, dest, tag, nbytes, data, request, tag in self.untracked)
        if after is None and not self._held:
            self._launch(message, request)
        else:
            self._hold(message, request, after)
        return request

    def send_numbers(
        self, numbers: tuple[float, ...], dest: int, tag: int, after: Event | None = None
    ) -> Operation:
        """Start to send numbers that nobody changes any more."""
        nbytes = 8 * len(numbers)
        request = Operation("send", None, dest, tag, nbytes)
        message = Message(self.rank, dest, tag, nbytes, numbers, request, tag in self.untracked)
        if after is None and not self._held:
            self._launch(message, request)
        else:
            self._hold(message, request, after)
        return request

    def _launch(self, message: Message, request: Operation) -> None:
        fabric, nbytes = self.fabric, message.nbytes
        if not message.free:
            self.traffic.bytes_sent += nbytes
            self.traffic.messages_sent += 1
        if fabric.dead and (self.rank in fabric.dead or message.dest in fabric.dead):
            self.fail(request, self.rank if self.rank in fabric.dead else message.dest)
            return
        if nbytes <= EAGER:
            message.payload = copied(message.payload)
            message.request = None
            self.complete(request)
        fabric.network.send(message)

    def _hold(self, message: Message, request: Operation, after: Event | None) -> None:
        """Send once ``after`` has happened and nothing is held with this tag for this rank."""
        key = (message.dest, message.tag)
        if key in self._held:
            self._held[key].append((message, after))
        elif after is None or after.query():
            self._launch(message, request)
        else:
            self._held[key] = deque([(message, after)])
            self.fabric.clock.at(self.fabric.clock.now + EVENT_POLL, self._release, key)

    def _release(self, key: tuple[int, int]) -> None:
        queue = self._held.get(key)
        while queue:
            message, after = queue[0]
            if after is not None and not after.query():
                self.fabric.clock.at(self.fabric.clock.now + EVENT_POLL, self._release, key)
                return
            queue.popleft()
            assert message.request is not None
            self._launch(message, message.request)
        self._held.pop(key, None)

    # -- receiving ----------------------------------------------------------------
    def receive(self, buffer: Tensor | None, nbytes: int, source: int, tag: int) -> Operation:
        """Post a receive; see :meth:`Transport.irecv`."""
        receive = Operation("receive", buffer, source, tag, nbytes)
        message = self.mailbox.take(source, tag)
        if message is not None:
            self._accept(receive, message)
        elif source in self.fabric.dead:
            self.fail(receive, source)
        else:
            self.mailbox.post(receive)
        return receive

    def arrived(self, message: Message) -> None:
        """Take the last byte of ``message``."""
        if message.tag in self._handlers:
            self._handle(message)
            return
        receive = self.mailbox.match(message)
        if receive is None:
            self.mailbox.keep(message)
        else:
            self._accept(receive, message)

    def _accept(self, receive: Operation, message: Message) -> None:
        fill(receive, message)
        self.complete(receive)
        self._taken(message)

    def _taken(self, message: Message) -> None:
        """Count a message that has left the network, and end its send."""
        if not message.free:
            self.traffic.bytes_received += message.nbytes
            self.traffic.messages_received += 1
        if message.request is not None and not message.request.done:  # else it was abandoned
            self.fabric.endpoints[message.source].complete(message.request)

    def cancel(self, receive: Operation) -> None:
        """Take back ``receive`` if nothing has matched it."""
        if self.mailbox.withdraw(receive):
            self.complete(receive)

    def abandon(self, request: Operation) -> None:
        """End ``request`` here; of a send the message goes on its way all the same."""
        if request.what == "receive":
            self.mailbox.withdraw(request)
        self.complete(request)

    def abandon_tags(self, tags: range) -> None:
        """End all receives and held sends of these tags; what has been sent goes on its way."""
        for tag in [tag for tag in self._handlers if tag in tags]:
            del self._handlers[tag]
        for key in [key for key in self._held if key[1] in tags]:
            del self._held[key]
        for receive in self.mailbox.withdraw_tags(tags):
            self.complete(receive)

    # -- handlers -----------------------------------------------------------------
    def register(self, tag: int, nbytes: int, handler: Handler) -> None:
        """Have ``handler`` called for the messages of ``tag``, those waiting included."""
        self._register(tag, nbytes, lambda message: handler(message.source, _handed(message)))

    def register_numbers(self, tag: int, nbytes: int, handler: Handler) -> None:
        """As :meth:`register`, for numbers."""
        self._register(tag, nbytes, lambda message: handler(message.source, _numbers(message)))

    def _register(self, tag: int, nbytes: int, take: Callable[[Message], None]) -> None:
        self._handlers[tag] = (nbytes, take)
        while (message := self.mailbox.take(ANY_SOURCE, tag)) is not None:
            self._handle(message)

    def _handle(self, message: Message) -> None:
        nbytes, take = self._handlers[message.tag]
        if message.nbytes > nbytes:
            raise too_long(message, nbytes)
        with self.fiber.handler():
            take(message)
        self._taken(message)

    # -- collectives --------------------------------------------------------------
    def collective(self, what: str, algorithm: Callable[..., Steps], *arguments: object) -> Request:
        """Start a collective; every rank of the job has to."""
        number = self._collective_calls
        self._collective_calls += 1
        # Tags below 0 belong to the collectives, one each: they may overlap.
        steps = algorithm(_Channel(self, -2 - number), *arguments)
        collective = Collective(what, number, steps, self._resume, self._finish)
        if self.fabric.dead:
            self.fail(collective, min(self.fabric.dead))
        else:
            self._collectives[number] = collective
            collective.advance()
        return collective

    def _resume(self, collective: Collective) -> None:
        # As an event, so that one rank's step never runs inside another's. A pause
        # stops it all the same: the network holds what it sends.
        self.fabric.clock.at(self.fabric.clock.now, Collective.advance, collective, LATE)

    def _finish(self, collective: Collective) -> None:
        del self._collectives[collective.number]
        self.complete(collective)

    def meet(self, fact: Any) -> list[Any]:
        """See :meth:`Simulation.meet`."""
        number, meetings = self._meetings, self.fabric.meetings
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
            for endpoint, attendance in meeting.waiting:
                endpoint.complete(attendance)
        return meeting.facts

    # -- failure and end ------------------------------------------------------------
    def peer_died(self, dead: int) -> None:
        """End what needs the rank ``dead``; collectives need every rank."""
        for collective in list(self._collectives.values()):
            for operation in collective.pending:
                self.mailbox.withdraw(operation)
            collective.abandon()
            del self._collectives[collective.number]
            self.fail(collective, dead)
        for receive in self.mailbox.withdraw_all(dead):
            self.fail(receive, dead)
        for key in [key for key in self._held if key[0] == dead]:
            for message, _ in self._held.pop(key):
                assert message.request is not None
                self.fail(message.request, dead)
        if not self.fiber.ended:
            with self.fiber.handler():
                for action in self.on_failure:
                    action(dead)

    def keep_delivered(self, dead: int) -> None:
        """Copy what has arrived in full from ``dead``, whose end may change its buffers."""
        for message in self.mailbox.unexpected():
            if message.source == dead and message.request is not None:
                message.request = None
                message.payload = copied(message.payload)

    def close(self) -> None:
        """Cancel the posted receives and the handlers."""
        self._handlers.clear()
        for receive in self.mailbox.withdraw_all():
            self.complete(receive)


class _Channel:
    """Point to point of one collective, under a tag of its own."""

    def __init__(self, endpoint: Endpoint, tag: int) -> None:
        self.rank = endpoint.rank
        self.size = endpoint.size
        self._endpoint = endpoint
        self._tag = tag

    def send(self, dest: int, part: Part) -> Operation:
        return self._endpoint.send(*part, dest, self._tag)

    def receive(self, source: int, part: Part) -> Operation:
        return self._endpoint.receive(*part, source, self._tag)


def _handed(message: Message) -> Tensor:
    """Return a message as its handler gets it: bytes that nobody else uses."""
    if message.payload is None:
        device = "meta" if message.nbytes else "cpu"
        return torch.empty(message.nbytes, dtype=torch.uint8, device=device)
    payload = as_bytes(in_memory(message.payload))
    return payload if message.request is None else payload.clone()


def _numbers(message: Message) -> Sequence[float]:
    """Return the numbers that a message holds."""
    if isinstance(message.payload, tuple):
        return message.payload
    found: list[float] = _handed(message).view(torch.float64).tolist()
    return found
