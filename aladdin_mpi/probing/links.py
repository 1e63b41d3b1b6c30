"""The network: rates and latencies between hosts, alone and all at once, and inside a host.

One rank of each host, its first, stands for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median, median_high

from aladdin_mpi.control.exchange import broadcast
from aladdin_mpi.probing.figures import Figure, figure
from aladdin_mpi.probing.streams import Flow, latencies, message_seconds, rates
from aladdin_mpi.transport.base import Transport

DIFFERS = 0.1
"""A link whose rate is further from the others', as a fraction, is one of its own."""
ALIKE = 0.2
"""Pairs of a host whose rates differ by less, as a fraction, are held up by the same link."""
SHORT = 16 * 1024
"""Bytes of the messages that tell what each takes on top; shorter ones may overtake others."""
LONGEST_SLOT, SHORTEST_SLOT = 0.3, 0.05
"""Seconds of a stream."""
STREAMS = 6
"""As long as so many of them takes a pair of hosts, with trials and latency."""
BOTH_WAYS = 4
"""Pairs that send in both directions at once, at most."""
LOCAL_HOSTS = 4
"""Hosts inside which the path is measured, at most."""

GoOn = Callable[[], bool]
"""At rank 0: whether there is time for more."""


@dataclass
class Network:
    """What was found, in Gbit/s and microseconds; None, or missing: it was not measured.

    Attributes:
        alone: rates by pairs of hosts, one pair at a time; the first one sends.
        together: of two directions at once, each one's share of what it has alone.
        at_once: rates by pairs of hosts, while all hosts send and receive.
        latency: between two hosts, of a short message.
        overhead: what a message takes on top of its bytes.
        local_rate: inside a host.
        local_latency: inside a host.
        skipped: pairs of hosts for which there was no time.
    """

    hosts: int
    alone: dict[Flow, Figure] = field(default_factory=dict)
    together: Figure | None = None
    at_once: dict[Flow, float] = field(default_factory=dict)
    latency: Figure | None = None
    overhead: float | None = None
    local_rate: Figure | None = None
    local_latency: Figure | None = None
    skipped: int = 0

    def host_rates(self) -> dict[int, float]:
        """Of each host's link: a pair goes as fast as the slower one, so that of its fastest pairs.

        Of those that are alike the median: the very fastest would be so by chance.
        """
        found: dict[int, list[float]] = {}
        for pair, rate in self.alone.items():
            for host in pair:
                found.setdefault(host, []).append(rate.value)
        return {
            host: median(rate for rate in of_host if rate > (1 - ALIKE) * max(of_host))
            for host, of_host in found.items()
        }

    def crowded(self) -> Figure | None:
        """While all hosts send, each one's share of what its links have alone."""
        alone = self.host_rates()
        shares = [
            rate / min(alone[a], alone[b])
            for (a, b), rate in self.at_once.items()
            if a in alone and b in alone
        ]
        return figure(shares) if shares else None

    def usual_rate(self) -> Figure | None:
        """Of the links that are alike, with those of all such links as its spread."""
        found = self.host_rates()
        if not found:
            return None
        usual = median_high(found.values())
        return figure([rate for rate in found.values() if abs(rate - usual) <= DIFFERS * usual])

    def other_links(self) -> dict[int, float]:
        """The hosts whose link differs from the usual one."""
        usual = self.usual_rate()
        return {
            host: rate
            for host, rate in self.host_rates().items()
            if usual is not None and abs(rate - usual.value) > DIFFERS * usual.value
        }


def measure_network(transport: Transport, seconds: float, go_on: GoOn) -> Network:
    """Measure it in about so many seconds; complete at rank 0.

    Args:
        transport: all ranks call it.
        seconds: for all of it.
        go_on: asked at rank 0 before each pair of hosts but the first.
    """
    first = _first_ranks(transport.hosts)
    found = Network(len(first))
    if len(first) > 1:
        _measure_between(transport, found, first, seconds, go_on)
    _measure_inside(transport, found, seconds)
    return found


def _first_ranks(hosts: Sequence[int]) -> list[int]:
    """The first rank of each host."""
    return [hosts.index(host) for host in range(max(hosts) + 1)]


def _pairs(hosts: int) -> Iterator[Flow]:
    """Ordered pairs of hosts: each host sends to the next one, then to the one after that, ..."""
    for distance in range(1, hosts):
        for host in range(hosts):
            yield host, (host + distance) % hosts


def _measure_between(
    transport: Transport, found: Network, first: Sequence[int], seconds: float, go_on: GoOn
) -> None:
    pairs = list(_pairs(found.hosts))
    streams = STREAMS * (len(pairs) + 1) + STREAMS * min(BOTH_WAYS, found.hosts)
    slot = min(LONGEST_SLOT, max(SHORTEST_SLOT, seconds / streams))
    delays: list[float] = []
    shares: list[float] = []
    for number, (a, b) in enumerate(pairs):
        if not broadcast(transport, number == 0 or go_on()):
            found.skipped = len(pairs) - number
            break
        flow = first[a], first[b]
        delays += latencies(transport, flow, slot / 3)
        for rate in rates(transport, [flow], slot):
            found.alone[a, b] = _gbit(rate)
        if number < BOTH_WAYS and a < b:
            for way in rates(transport, [flow, flow[::-1]], slot):
                shares.append(_gbit(way).value / found.alone[a, b].value)
    _measure_crowd(transport, found, first, slot)
    one = found.alone.get((0, 1))
    # Only rank 0 knows the rate, and only there the figure counts.
    row = message_seconds(transport, (first[0], first[1]), one.value / 8e-9 if one else 1.0, SHORT)
    if transport.rank == 0:
        found.latency = figure([1e6 * delay for delay in delays])
        found.together = figure(shares)
        found.overhead = max(0.0, 1e6 * row)


def _measure_crowd(transport: Transport, found: Network, first: Sequence[int], slot: float) -> None:
    """All at once: each host sends to one that is far from it, and hears from another."""
    shift = max(1, found.hosts // 2)
    pairs = [(host, (host + shift) % found.hosts) for host in range(found.hosts)]
    flows = [(first[a], first[b]) for a, b in pairs]
    for pair, rate in zip(pairs, rates(transport, flows, slot), strict=False):
        found.at_once[pair] = _gbit(rate).value


def _measure_inside(transport: Transport, found: Network, seconds: float) -> None:
    pairs = [
        (ranks[0], ranks[1])
        for host in range(found.hosts)
        for ranks in [[rank for rank, other in enumerate(transport.hosts) if other == host]]
        if len(ranks) > 1
    ][:LOCAL_HOSTS]
    slot = min(LONGEST_SLOT, max(SHORTEST_SLOT, seconds / (4 * LOCAL_HOSTS)))
    delays: list[float] = []
    inside: list[float] = []
    for pair in pairs:
        delays += latencies(transport, pair, slot / 3)
        inside += [rate for flow in rates(transport, [pair], slot) for rate in flow]
    if delays:
        found.local_latency = figure([1e6 * delay for delay in delays])
        found.local_rate = _gbit(inside)


def _gbit(bytes_per_second: Sequence[float]) -> Figure:
    return figure(bytes_per_second).scaled(8e-9)
