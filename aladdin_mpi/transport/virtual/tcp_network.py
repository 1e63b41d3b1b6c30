"""The network where messages share links as Open MPI's do over TCP.

It differs in four things from links that serve their flows evenly (:mod:`.network`). Each was seen
in the network lab by messages alone (`benchmarks.sharing`), and none is fitted to training:

- **Uneven shares.** Of flows that share a link, one gets ahead of the other for as long as a burst
  of messages lasts. A burst draws the size of its pieces: log-normal, :data:`UNEVENNESS`.
- **Little under way.** A full link in holds a fraction of a megabyte, so that a flow which meets
  one waits at the sender, whose link serves others: a piece starts when the one before it has got
  through.
- **Messages interleave.** Those that wait for their turn between two ranks go together, a piece
  of each at a time, and end together. What is announced meanwhile is behind them, since its
  announcement is. At most :data:`MOST` go together: a handler has so many receives posted.
- **Stalls.** The last segments of a burst on a crowded link may be lost. No later ones show that
  to the sender, which waits for its retransmission timer: 0.2 s on Linux (RFC 6298).
"""

from __future__ import annotations

from math import exp

from aladdin_mpi.transport.virtual.network import Flow, Link, Network

UNEVENNESS = 0.35
"""Standard deviation of the logarithm of a burst's share."""
STALLS = 0.01
"""Share of the bursts on a crowded link whose end is lost; 0.001 to 0.014 in several traces."""
RETRANSMISSION_SECONDS = 0.2
CROWDED = 2
"""Pieces that queue for a link in when it is crowded."""
MOST = 4
"""Messages of a burst."""


class _TcpFlow(Flow):
    """``burst`` is the number of messages that interleave; ``share`` scales their pieces."""

    __slots__ = ("burst", "share")

    def __init__(self, source: int, link: Link, into: Link | None) -> None:
        super().__init__(source, link, into)
        self.is_even = into is None
        self.burst = 0
        self.share = 1.0


class TcpNetwork(Network):
    """Carries messages as :class:`Network` does, but for what happens between two hosts."""

    flow_class = _TcpFlow

    def _start_piece(self, flow: Flow, link: Link) -> float:
        into = flow.into
        if into is None:
            return super()._start_piece(flow, link)
        assert isinstance(flow, _TcpFlow)
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

    def _stall(self, flow: _TcpFlow, link: Link, arrival: float, leaving: float) -> float:
        """Seconds until the end of a burst has been sent again, where it is lost."""
        if flow.queue:
            return 0.0
        queued = arrival - link.latency - self._clock.now - leaving
        is_crowded = bool(link.flows) or queued > (CROWDED - 1) * leaving
        if is_crowded and self._clock.random.random() < STALLS:
            return RETRANSMISSION_SECONDS
        return 0.0
