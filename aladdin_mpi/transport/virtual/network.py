"""Model of the time that messages take on the network.

Each host has one outgoing and one incoming link, and a faster local path for messages within the
host. An outgoing link serves its flows (the messages of one rank to one other) in turn, one piece
at a time (:data:`QUANTUM`, :data:`PIECES`), in first-in, first-out order within a flow. After the
latency the piece passes the receiver's incoming link, in the order in which first bytes arrive,
while its later bytes are still in flight: on an idle network a message takes ``overhead + latency
+ bytes / bandwidth``, not twice the bytes. Since the latency is constant, first bytes arrive in
the order in which pieces start, whatever the links' speeds, and the time on the incoming link is
known when a piece starts: two events for each message are sufficient.

Links may differ. A piece occupies each link for the time that its bytes need there, and arrives
when both links are done with it:

- From a fast link to a slow one, a flow starts its pieces at the rate of the slow one, and is at
  most one piece ahead of it, like a sender with a window of two. Between pieces the outgoing
  link serves other flows.
- From a slow link to a fast one, the last byte arrives when it has left the slow one. The piece
  occupies the fast link for one uninterrupted interval, as early as possible.

A flow thus has the rate of the slower link, and no link exceeds its bandwidth over intervals
longer than a piece.

Short messages (:data:`EXPRESS`) overtake bulk data, as on a network that is fair to its flows,
unless they are longer than :data:`CONTROL` and occupy the link for :data:`EXPRESS_SECONDS`.
Messages with the same (source, dest, tag) are still matched in order.
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
"""Largest message, in bytes, that overtakes queued bulk data."""
EXPRESS_SECONDS = 1e-3
"""Longest time that such a message takes on its link, ..."""
CONTROL = 256
"""... unless it has at most so many bytes, as requests and reports have."""


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
    """The messages of one rank to one other; ``into`` is None within a host.

    ``ready`` is the earliest start of its next piece, ``seconds_per_byte`` that of the slowest link
    on its path, and ``is_even`` whether the links on its path have equal speed. If it
    ``is_continuous``, nothing delays a piece after the previous one. Of its first message
    ``middle_pieces`` pieces of ``piece`` bytes, between the first and the last, have not started.
    They are the majority, and their data are kept here, since with a thousand flows in turn each
    access to another object is a cache miss.
    """

    source: int
    link: Link
    into: Link | None
    seconds_per_byte: float
    is_even: bool
    is_continuous: bool
    middle_pieces: int = 0
    piece: int = 0
    queue: deque[Message] = field(default_factory=deque)
    undelivered: dict[int, deque[Message]] = field(default_factory=dict)
    arrived: float = 0.0
    ready: float = 0.0
    active: bool = False
    burst: int = 0
    """Over TCP: the number of messages that interleave, ..."""
    share: float = 1.0
    """... and the factor on the size of their pieces."""


class Network:
    """Network that calls ``deliver`` with each message when its last byte has arrived."""

    def __init__(
        self, cluster: Cluster, size: int, clock: VirtualClock, deliver: Callable[[Message], None]
    ) -> None:
        self._clock = clock
        self._deliver = deliver
        self._size = size
        self.hosts = [cluster.host_of(rank, size) for rank in range(size)]
        """For every rank the index of its host."""
        self._overhead = cluster.message_overhead_us * 1e-6
        self._delay = cluster.delay_us * 1e-6
        self._pauses = [cluster.pauses_of(r) for r in range(size)] if cluster.pauses else None
        self._flows: dict[int, Flow] = {}
        rates = [cluster.link_gbit(host) for host in range(cluster.hosts)]
        self._out = [Link(gbit, cluster.latency_us) for gbit in rates]
        self._in = [Link(gbit, cluster.latency_us) for gbit in rates]
        self._local = [Link(cluster.local_bandwidth_gbit, cluster.local_latency_us) for _ in rates]

    def carried(self) -> dict[str, list[int]]:
        """Return the bytes that every host's links have carried, except for short messages.

        The current piece of an outgoing link counts as a whole. An incoming link counts pieces when
        they leave the sender, so that some may still queue for it.
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
        """Queue ``message`` after the earlier ones of its pair of ranks."""
        flow = self._flows.get(message.source * self._size + message.dest)
        if flow is None:
            flow = self._open(message.source, message.dest)
        queue = flow.undelivered.get(message.tag)
        if queue is None:
            flow.undelivered[message.tag] = queue = deque()
        queue.append(message)
        if message.free or self._is_express(message.nbytes, flow):
            self._send_express(flow, message)
            return
        message.cut()
        flow.queue.append(message)
        if not flow.active:
            flow.active = True
            self._enlist(flow)

    def _is_express(self, nbytes: int, flow: Flow) -> bool:
        """Return whether a message of ``nbytes`` overtakes the others of its link."""
        if nbytes > EXPRESS:
            return False
        return nbytes <= CONTROL or nbytes * flow.seconds_per_byte <= EXPRESS_SECONDS

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
        """Queue ``flow`` for its link, once its receiver and a pause of its sender allow it."""
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
        """Start the next piece of ``flow``; return the time at which ``link`` is done with it."""
        clock = self._clock
        if flow.middle_pieces:
            return self._start_next(flow, link)
        message = flow.queue[0]
        unsent, piece = message.unsent, message.piece
        if unsent < piece:
            piece = unsent
        overhead = 0.0
        if unsent == message.nbytes:
            overhead = self._overhead
            if flow.is_continuous and unsent > 2 * piece:
                flow.middle_pieces, flow.piece = -(-unsent // piece) - 2, piece
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
        message.unsent = unsent - piece * (1 + flow.middle_pieces)
        if unsent == piece:
            flow.queue.popleft()
            # Never before the previous message of the same pair.
            flow.arrived = max(self._delayed(message, arrival), flow.arrived)
            clock.at(flow.arrived, self._arrive, message)
        return now + duration

    def _start_next(self, flow: Flow, link: Link) -> float:
        """Start a middle piece of a message, as :meth:`_start_piece` does for the others."""
        flow.middle_pieces -= 1
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
        """Return when a piece has passed ``into``, if it takes ``leaving`` on the outgoing link.

        For two equal links this is the end of its time on ``into``, and no flow is delayed.
        """
        first = self._clock.now + into.latency
        passing = piece * into.seconds_per_byte + overhead
        into.free = max(first, into.free) + passing
        flow.ready = max(flow.ready, self._clock.now - passing) + passing
        return max(into.free, first + leaving)

    def _delayed(self, message: Message, time: float) -> float:
        """Return the arrival time of a message whose last byte has passed at ``time``."""
        if self._delay:
            time += self._clock.random.expovariate(1.0 / self._delay)
        if self._pauses is not None:
            time = self._pauses[message.dest].resumed(time)
        return time

    def _end_piece(self, flow: Flow) -> None:
        """Start the next piece on the link of ``flow``, and more if no other event comes first."""
        link, clock = flow.link, self._clock
        due = clock.next_due()
        while flow.is_continuous and (flow.middle_pieces or flow.queue):
            flows = link.flows
            if flows:  # other flows first
                flows.append(flow)
                flow = flows.popleft()
                while not (flow.middle_pieces or flow.queue):
                    flow.active = False
                    flow = flows.popleft()
            if flow.middle_pieces:
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
        """Deliver messages that may be matched now, those with one tag in sending order."""
        message.arrived = True
        flow = self._flows[message.source * self._size + message.dest]
        queue = flow.undelivered.get(message.tag)
        while queue and queue[0].arrived:
            self._deliver(queue.popleft())

    def drop(self, rank: int) -> list[Message]:
        """Drop queued messages from and to ``rank``; return all that are lost on the way to it.

        Messages that have left the sender's link arrive nevertheless: ``deliver`` must ignore
        them.
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
            flow.middle_pieces = 0
        return lost


UNEVENNESS = 0.35
"""Standard deviation of the logarithm of a burst's share."""
STALLS = 0.01
"""Share of the bursts on a crowded link whose end is lost; 0.001 to 0.014 in several traces."""
RETRANSMISSION_SECONDS = 0.2
CROWDED = 2
"""Number of queued pieces that makes an incoming link crowded."""
MOST = 4
"""Largest number of messages in a burst."""


class TcpNetwork(Network):
    """Network with TCP's sharing between two hosts, otherwise like :class:`Network`."""

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
        """Return when a piece has passed ``into``; the next one starts when it begins to pass."""
        passing = piece * into.seconds_per_byte + overhead
        first = self._clock.now + flow.link.latency
        into.free = max(first, into.free) + passing
        arrival = max(into.free, first + leaving)
        flow.ready = arrival - flow.link.latency - passing
        return arrival

    def _stall(self, flow: Flow, link: Link, arrival: float, leaving: float) -> float:
        """Return the retransmission delay of a burst, 0 unless its end is lost."""
        if flow.queue:
            return 0.0
        queued = arrival - link.latency - self._clock.now - leaving
        is_crowded = bool(link.flows) or queued > (CROWDED - 1) * leaving
        if is_crowded and self._clock.random.random() < STALLS:
            return RETRANSMISSION_SECONDS
        return 0.0
