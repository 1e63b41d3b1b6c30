"""The time that messages take on the wire.

Each host has one link out and one link in, and a faster path of its own for the messages inside
it. A link out serves its flows (the messages of one rank to one other) in turn, a piece at a time
(:data:`QUANTUM`, :data:`PIECES`), and first in, first out within a flow. After the latency the
piece goes through the receiver's link in, in the order in which the first bytes arrive, while its
later bytes are still under way: an idle network takes ``overhead + latency + bytes / bandwidth``
for a message, not twice the bytes. The latency is one constant, so first bytes arrive in the order
in which pieces start, however fast the links are, and the time on the link in is known when a
piece starts: two events a message are enough.

Links may differ. A piece takes of each link the time that its bytes need there, and
arrives when both are done with it:

- From a fast link to a slow one, a flow starts its pieces as fast as the slow one could
  take them, and is at most one ahead of that, as a sender with a window of two. Between
  them the link out serves others.
- From a slow link to a fast one, the last byte arrives when it has left the slow one. Of
  the fast one the piece takes its time in one go, as soon as it may; the rest is others'.

So a flow goes at the pace of the slower link, and no link carries more than it can over
times longer than a piece.

Short messages (:data:`EXPRESS`) do not queue behind bulk data: a network that is fair to its flows
gives a short one its share at once. They take the same latency and overhead, and matching still
sees all messages of one (source, dest, tag) in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp

from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.transport.virtual.fiber import VirtualClock
from aladdin_mpi.transport.virtual.messages import Message

EXPRESS = 4096
"""Bytes up to which a message goes past the bulk data that is queued."""


class Link:
    """A resource that serves one piece after the other."""

    __slots__ = ("busy", "carried", "flows", "free", "latency", "seconds_per_byte")

    def __init__(self, gbit: float, latency_us: float) -> None:
        self.seconds_per_byte = 8e-9 / gbit
        self.latency = latency_us * 1e-6
        self.flows: deque[Flow] = deque()
        self.busy = False
        self.free = 0.0
        self.carried = 0


@dataclass(slots=True, eq=False)
class Flow:
    """The messages of one rank to one other; ``into`` is None inside a host.

    ``ready`` is when its next piece may start, ``seconds_per_byte`` that of the slowest link on
    its way, and ``is_even`` says that the links on its way are alike. If it ``goes_on``, nothing
    holds a piece back behind the one before. Of its first message ``midst`` pieces of ``piece``
    bytes have not started, between the first and the last: they are most, and what they need is at
    hand, for where a thousand flows take turns each look at another object is one past the cache.
    """

    source: int
    link: Link
    into: Link | None
    seconds_per_byte: float
    is_even: bool
    goes_on: bool
    midst: int = 0
    piece: int = 0
    queue: deque[Message] = field(default_factory=deque)
    undelivered: dict[int, deque[Message]] = field(default_factory=dict)
    arrived: float = 0.0
    ready: float = 0.0
    active: bool = False
    burst: int = 0
    """Over TCP: the number of messages that interleave, ..."""
    share: float = 1.0
    """... which scales their pieces."""


class Network:
    """Carries messages and calls ``deliver`` with each when its last byte has arrived."""

    def __init__(
        self, cluster: Cluster, size: int, clock: VirtualClock, deliver: Callable[[Message], None]
    ) -> None:
        self._clock = clock
        self._deliver = deliver
        self._size = size
        self.hosts = [cluster.host_of(rank, size) for rank in range(size)]
        """For every rank the number of its host."""
        self._overhead = cluster.message_overhead_us * 1e-6
        self._delay = cluster.delay_us * 1e-6
        self._pauses = [cluster.pauses_of(r) for r in range(size)] if cluster.pauses else None
        self._flows: dict[int, Flow] = {}
        rates = [cluster.link_gbit(host) for host in range(cluster.hosts)]
        self._out = [Link(gbit, cluster.latency_us) for gbit in rates]
        self._in = [Link(gbit, cluster.latency_us) for gbit in rates]
        self._local = [Link(cluster.local_bandwidth_gbit, cluster.local_latency_us) for _ in rates]

    def carried(self) -> dict[str, list[int]]:
        """Bytes that every host's links have carried, but for short messages.

        Of a link out the piece that it carries counts as a whole; a link in takes pieces when they
        leave the sender, so that some may still queue for it.
        """
        now = self._clock.now
        return {
            name: [
                max(0, link.carried - round(max(0.0, link.free - now) / link.seconds_per_byte))
                for link in links
            ]
            for name, links in (("out", self._out), ("in", self._in), ("local", self._local))
        }

    def send(self, message: Message) -> None:
        """Put ``message`` behind the earlier ones of its pair of ranks."""
        flow = self._flows.get(message.source * self._size + message.dest)
        if flow is None:
            flow = self._open(message.source, message.dest)
        queue = flow.undelivered.get(message.tag)
        if queue is None:
            flow.undelivered[message.tag] = queue = deque()
        queue.append(message)
        if message.free or message.nbytes <= EXPRESS:
            self._send_express(flow, message)
            return
        message.cut()
        flow.queue.append(message)
        if not flow.active:
            flow.active = True
            self._enlist(flow)

    def _send_express(self, flow: Flow, message: Message) -> None:
        start = self._clock.now
        if self._pauses is not None:
            start = self._pauses[flow.source].resumed(start)
        duration = 0.0
        if not message.free:
            duration = self._overhead + message.nbytes * flow.seconds_per_byte
        arrival = self._delayed(message, start + flow.link.latency + duration)
        self._clock.at(arrival, self._arrive, message)

    def _open(self, source: int, dest: int) -> Flow:
        host, other = self.hosts[source], self.hosts[dest]
        link, into = (
            (self._out[host], self._in[other]) if host != other else (self._local[host], None)
        )
        slowest = max(link.seconds_per_byte, (into or link).seconds_per_byte)
        is_even = self._is_even(link, into)
        flow = Flow(source, link, into, slowest, is_even, is_even and self._pauses is None)
        self._flows[source * self._size + dest] = flow
        return flow

    def _is_even(self, link: Link, into: Link | None) -> bool:
        return into is None or into.seconds_per_byte == link.seconds_per_byte

    def _enlist(self, flow: Flow) -> None:
        """Let ``flow`` queue for its link, when its receiver and a pause of its sender allow it."""
        now = self._clock.now
        if flow.ready > now:
            self._clock.at(flow.ready, self._enlist, flow)
            return
        if self._pauses is not None:
            resumed = self._pauses[flow.source].resumed(now)
            if resumed > now:
                self._clock.at(resumed, self._enlist, flow)
                return
        flow.link.flows.append(flow)
        if not flow.link.busy:
            self._serve(flow.link)

    def _serve(self, link: Link) -> None:
        """Start the next piece on ``link``, which is idle."""
        flows = link.flows
        while flows:
            flow = flows.popleft()
            if flow.queue:
                link.busy = True
                self._clock.at(self._start_piece(flow, link), self._end_piece, flow)
                return
            flow.active = False

    def _start_piece(self, flow: Flow, link: Link) -> float:
        """Start the next piece of ``flow``; return when ``link`` is done with it."""
        clock = self._clock
        if flow.midst:
            return self._start_next(flow, link)
        message = flow.queue[0]
        unsent, piece = message.unsent, message.piece
        if unsent < piece:
            piece = unsent
        overhead = 0.0
        if unsent == message.nbytes:
            overhead = self._overhead
            if flow.goes_on and unsent > 2 * piece:
                flow.midst, flow.piece = -(-unsent // piece) - 2, piece
        duration = piece * link.seconds_per_byte + overhead
        link.carried += piece
        now = clock.now
        arrival = now + duration + link.latency
        into = flow.into
        if into is not None:
            into.carried += piece
            if flow.is_even:
                first = now + link.latency
                into.free = arrival = (first if first > into.free else into.free) + duration
            else:
                arrival = self._pass_in(flow, into, piece, overhead, duration)
        message.unsent = unsent - piece * (1 + flow.midst)
        if unsent == piece:
            flow.queue.popleft()
            # Never before its predecessor of the same pair.
            flow.arrived = max(self._delayed(message, arrival), flow.arrived)
            clock.at(flow.arrived, self._arrive, message)
        return now + duration

    def _start_next(self, flow: Flow, link: Link) -> float:
        """As :meth:`_start_piece`, between the first and the last of a message."""
        flow.midst -= 1
        now, piece = self._clock.now, flow.piece
        duration = piece * link.seconds_per_byte
        link.carried += piece
        into = flow.into
        if into is not None:
            into.carried += piece
            first, free = now + link.latency, into.free
            into.free = (first if first > free else free) + duration
        return now + duration

    def _pass_in(
        self, flow: Flow, into: Link, piece: int, overhead: float, leaving: float
    ) -> float:
        """When a piece is through ``into``, another link than that which it takes so long to leave.

        Of two equal links it is the end of the piece's time on ``into``, and no flow is held back.
        """
        first = self._clock.now + into.latency
        passing = piece * into.seconds_per_byte + overhead
        into.free = max(first, into.free) + passing
        flow.ready = max(flow.ready, self._clock.now - passing) + passing
        return max(into.free, first + leaving)

    def _delayed(self, message: Message, time: float) -> float:
        """Return when a message arrives whose last byte is through at ``time``."""
        if self._delay:
            time += self._clock.random.expovariate(1.0 / self._delay)
        if self._pauses is not None:
            time = self._pauses[message.dest].resumed(time)
        return time

    def _end_piece(self, flow: Flow) -> None:
        """Start the next piece on the link of ``flow``; as many as no other event comes between."""
        link, clock = flow.link, self._clock
        due = clock.next_due()
        while flow.goes_on and (flow.midst or flow.queue):
            flows = link.flows
            if flows:  # the others first
                flows.append(flow)
                flow = flows.popleft()
                while not (flow.midst or flow.queue):
                    flow.active = False
                    flow = flows.popleft()
            if flow.midst:
                end = self._start_next(flow, link)
            else:
                end, due = self._start_piece(flow, link), clock.next_due()
            if end >= due:
                clock.at(end, self._end_piece, flow)
                return
            clock.pass_by()
            clock.now = end
        link.busy = False
        if flow.queue:
            self._enlist(flow)
        else:
            flow.active = False
        if not link.busy:
            self._serve(link)

    def _arrive(self, message: Message) -> None:
        """Deliver what may be matched now: messages of a tag in the order of sending."""
        message.arrived = True
        flow = self._flows[message.source * self._size + message.dest]
        queue = flow.undelivered.get(message.tag)
        while queue and queue[0].arrived:
            self._deliver(queue.popleft())

    def drop(self, rank: int) -> list[Message]:
        """Forget what is queued from and to ``rank``; return all that is lost on its way to it.

        Messages that have left the sender's link arrive nevertheless: ``deliver`` must
        ignore them.
        """
        lost: list[Message] = []
        for key, flow in self._flows.items():
            if key % self._size == rank:
                for queue in flow.undelivered.values():
                    lost += queue
                flow.undelivered.clear()
            elif flow.source != rank:
                continue
            for message in flow.queue:
                if message.tag in flow.undelivered:
                    flow.undelivered[message.tag].remove(message)
            flow.queue.clear()
            flow.midst = 0
        return lost


UNEVENNESS = 0.35
"""Standard deviation of the logarithm of a burst's share."""
STALLS = 0.01
"""Share of the bursts on a crowded link whose end is lost; 0.001 to 0.014 in several traces."""
RETRANSMISSION_SECONDS = 0.2
CROWDED = 2
"""Pieces that queue for a link in when it is crowded."""
MOST = 4
"""Messages of a burst."""


class TcpNetwork(Network):
    """Carries messages as :class:`Network` does, except between two hosts."""

    def _is_even(self, link: Link, into: Link | None) -> bool:
        return into is None

    def _start_piece(self, flow: Flow, link: Link) -> float:
        into = flow.into
        if into is None:
            return super()._start_piece(flow, link)
        if not flow.burst:
            flow.burst = min(MOST, len(flow.queue))
            flow.share = exp(self._clock.random.gauss(0.0, UNEVENNESS))
        message, clock = flow.queue[0], self._clock
        unsent = message.unsent
        piece = min(unsent, max(1, int(message.piece * flow.share)))
        overhead = self._overhead if unsent == message.nbytes else 0.0
        leaving = piece * link.seconds_per_byte + overhead
        link.carried += piece
        into.carried += piece
        arrival = self._pass_in(flow, into, piece, overhead, leaving)
        message.unsent = unsent - piece
        flow.queue.popleft()
        if message.unsent:
            flow.queue.insert(flow.burst - 1, message)
        else:
            flow.burst -= 1
            arrival += self._stall(flow, link, arrival, leaving)
            flow.arrived = max(self._delayed(message, arrival), flow.arrived)
            clock.at(flow.arrived, self._arrive, message)
        return clock.now + leaving

    def _pass_in(
        self, flow: Flow, into: Link, piece: int, overhead: float, leaving: float
    ) -> float:
        """When a piece is through ``into``; the next one starts when it begins to get through."""
        passing = piece * into.seconds_per_byte + overhead
        first = self._clock.now + flow.link.latency
        into.free = max(first, into.free) + passing
        arrival = max(into.free, first + leaving)
        flow.ready = arrival - flow.link.latency - passing
        return arrival

    def _stall(self, flow: Flow, link: Link, arrival: float, leaving: float) -> float:
        """Seconds until the end of a burst has been sent again, where it is lost."""
        if flow.queue:
            return 0.0
        queued = arrival - link.latency - self._clock.now - leaving
        is_crowded = bool(link.flows) or queued > (CROWDED - 1) * leaving
        if is_crowded and self._clock.random.random() < STALLS:
            return RETRANSMISSION_SECONDS
        return 0.0
