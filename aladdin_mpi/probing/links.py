"""Measurements of the network: rates and latencies between hosts and inside a host.

One rank of each host, its first, stands for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median, median_high
from typing import NamedTuple

import torch

from aladdin_mpi.control.exchange import barrier, broadcast, gather
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.probing.cluster_file import Figure, figure
from aladdin_mpi.transport.base import Request, Transport

VECTOR_BYTES = 64_000_000
"""More than a cache holds."""
HOST_REPEATS = 9
MESSAGES, BURST = 400, 8


def memory_bandwidth(seconds: float) -> Figure:
    """GB/s that this process moves in memory as it adds up gradients: two are read, one written.

    Raises:
        RuntimeError: there is no memory for it.
    """
    total, gradient = (torch.ones(VECTOR_BYTES // 4) for _ in range(2))
    total.add_(gradient)  # its pages are there from now on
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < 3 or (len(found) < HOST_REPEATS and time.perf_counter() < end):
        start = time.perf_counter()
        total.add_(gradient)
        found.append(3e-9 * VECTOR_BYTES / (time.perf_counter() - start))
    return figure(found)


def message_cost(transport: Transport) -> Figure:
    """Microseconds of this process for each message that it sends or takes in, without its bytes.

    To itself, in bursts, so that no network has a part in it.
    """
    found = []
    for _ in range(MESSAGES // BURST):
        buffers = [torch.zeros(8, dtype=torch.uint8) for _ in range(2 * BURST)]
        start = transport.now()
        own = transport.rank
        receives = [transport.irecv(buffer, own, Tag.PROBE) for buffer in buffers[:BURST]]
        sends = [transport.isend(buffer, own, Tag.PROBE) for buffer in buffers[BURST:]]
        transport.wait(*receives, *sends)
        found.append(1e6 * (transport.now() - start) / (2 * BURST))
    return figure(found)


def spare_cores(transport: Transport, cores: int) -> tuple[int, int] | None:
    """At rank 0: the cores of its host that the ranks' threads leave, and all ``cores`` of it."""
    threads = gather(transport, torch.get_num_threads())
    if not threads:
        return None
    used = sum(
        n for n, host in zip(threads, transport.hosts, strict=True) if host == transport.host
    )
    return max(0, cores - used), cores


Flow = tuple[int, int]
"""The rank that sends and the one that receives."""

FIRST_TRIAL, GROWTH = 64 * 1024, 4
"""Bytes of the first, shortest stream, and by what factor the next one is longer."""
LONG_ENOUGH = 1 / 3
"""Of the time of a stream, that a trial has to take to tell how long the others have to be."""
SMALLEST, LARGEST = 128 * 1024, 4_000_000
"""Bytes of a message of a stream; the largest is that of a bucket."""
FEWEST, MOST = 16, 1024
"""Messages of a stream."""
WINDOW = 2
"""Messages under way. MPI may move so many at the same time, piece by piece, and with many it would
send the beginnings of all first: Open MPI announces a message with its first 64 KB."""
REPEATS = 3
WORD = 8
"""Bytes of a message whose latency is measured."""
ROUNDS = (5, 60)
"""Messages with their answers, at least and at most."""


class Length(NamedTuple):
    """Of a stream: bytes of each message, and how many messages."""

    nbytes: int
    messages: int


class FlowResult(NamedTuple):
    """One flow of a stream: bytes/s, and seconds from its start to its end."""

    rate: float
    seconds: float


def rates(transport: Transport, flows: Sequence[Flow], slot: float) -> list[list[float]]:
    """Bytes/s of each flow, all of them at the same time; several times, about ``slot`` s each.

    At rank 0; elsewhere empty.
    """
    length = _length(_long_enough(transport, flows, slot))
    found = [_stream(transport, flows, length) for _ in range(REPEATS)]
    return [[result.rate for result in of_flow] for of_flow in zip(*found, strict=True)]


def _long_enough(transport: Transport, flows: Sequence[Flow], slot: float) -> int:
    """Bytes of a stream that takes ``slot`` seconds. Short ones say little: queues take them."""
    total, is_known = FIRST_TRIAL, False
    while not is_known:
        results = _stream(transport, flows, _length(total))
        longest = max((each.seconds for each in results), default=0.0)
        is_known = longest >= slot * LONG_ENOUGH or total >= LARGEST * MOST
        after = round(total * slot / longest) if is_known and longest else total * GROWTH
        total, is_known = broadcast(transport, (after, is_known))
    return total


def _length(total: int) -> Length:
    nbytes = min(LARGEST, max(SMALLEST, total // FEWEST))
    messages = min(MOST, max(FEWEST, total // nbytes))
    return Length(nbytes, messages - messages % WINDOW)


def _stream(transport: Transport, flows: Sequence[Flow], length: Length) -> list[FlowResult]:
    """Each flow once, all at the same time; at rank 0."""
    barrier(transport)
    ends = {
        number: _End(transport, flow, length)
        for number, flow in enumerate(flows)
        if transport.rank in flow
    }
    while waiting := [end for end in ends.values() if end.under_way]:
        waiting[transport.wait_any([end.under_way[0] for end in waiting])].advance()
    own = [[n, *end.result()] for n, end in ends.items() if flows[n][1] == transport.rank]
    told = sorted(result for results in gather(transport, own) for result in results)
    return [FlowResult(rate, seconds) for _, rate, seconds in told]


class _End:
    """One end of a flow, with the messages that are under way."""

    def __init__(self, transport: Transport, flow: Flow, length: Length) -> None:
        self._transport = transport
        source, dest = flow
        is_source = source == transport.rank
        self._post = transport.isend if is_source else transport.irecv
        self._other = dest if is_source else source
        self._length = length
        self._buffers = [torch.zeros(length.nbytes, dtype=torch.uint8) for _ in range(WINDOW)]
        self._begun = self._ended = 0
        self.under_way: deque[Request] = deque()
        self._start = self._first = self._last = transport.now()
        for _ in range(WINDOW):
            self._begin()

    def _begin(self) -> None:
        if self._begun < self._length.messages:
            buffer = self._buffers[self._begun % WINDOW]
            self.under_way.append(self._post(buffer, self._other, Tag.PROBE))
            self._begun += 1

    def advance(self) -> None:
        """The oldest message has passed."""
        self.under_way.popleft()
        self._last = self._transport.now()
        self._ended += 1
        if self._ended == WINDOW:
            self._first = self._last
        self._begin()

    def result(self) -> FlowResult:
        """From the end of the first messages that were under way to that of the last one."""
        nbytes = self._length.nbytes * (self._ended - WINDOW)
        return FlowResult(nbytes / max(self._last - self._first, 1e-9), self._last - self._start)


def latencies(transport: Transport, pair: Flow, seconds: float) -> list[float]:
    """Seconds that a short message takes, half of a message and its answer, some times.

    At rank 0; elsewhere empty.
    """
    barrier(transport)
    source, dest = pair
    own: list[float] = []
    if transport.rank == source:
        own = _ask(transport, dest, seconds)
    elif transport.rank == dest:
        _answer(transport, source)
    return next((each for each in gather(transport, own) if each), [])


def _ask(transport: Transport, other: int, seconds: float) -> list[float]:
    end = transport.now() + seconds
    found: list[float] = []
    fewest, most = ROUNDS
    is_last = False
    while not is_last:
        is_last = len(found) >= fewest and (len(found) >= most or transport.now() > end)
        word, answer = torch.tensor([float(is_last)], dtype=torch.float64), torch.empty(WORD)
        begin = transport.now()
        receive = transport.irecv(answer, other, Tag.PROBE)
        transport.wait(transport.isend(word, other, Tag.PROBE), receive)
        found.append((transport.now() - begin) / 2)
    return found[1:]  # the first one may have made the connection


def _answer(transport: Transport, other: int) -> None:
    word = torch.zeros(1, dtype=torch.float64)
    while not word.item():
        transport.wait(transport.irecv(word, other, Tag.PROBE))
        transport.wait(transport.isend(torch.zeros(1, dtype=torch.float64), other, Tag.PROBE))


def message_seconds(transport: Transport, pair: Flow, rate: float, nbytes: int) -> float:
    """What a message in a row of them takes beyond its bytes at ``rate`` bytes/s; at rank 0.

    Of several rows the median. Below zero if it cannot be told from noise.
    """
    found = [_stream(transport, [pair], Length(nbytes, 200)) for _ in range(REPEATS)]
    if transport.rank:
        return 0.0
    return nbytes / median(result.rate for (result,) in found) - nbytes / rate


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


@dataclass
class NetworkFigures:
    """Rates in Gbit/s and times in microseconds; None, or missing: it was not measured.

    Attributes:
        alone: rates by pairs of hosts, one pair at a time; the first one sends.
        together: of two directions at once, each one's share of what it has alone.
        at_once: rates by pairs of hosts, while all hosts send and receive.
        latency: between two hosts, of a short message.
        overhead: what a message takes on top of its bytes.
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
            host: median(rate for rate in rates if rate > (1 - ALIKE) * max(rates))
            for host, rates in found.items()
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
        if usual is None:
            return {}
        rates, most = self.host_rates().items(), DIFFERS * usual.value
        return {host: rate for host, rate in rates if abs(rate - usual.value) > most}


def measure_network(
    transport: Transport, seconds: float, has_time: Callable[[], bool]
) -> NetworkFigures:
    """Measure it in about so many seconds; complete at rank 0.

    Args:
        transport: all ranks call it.
        seconds: for all of it.
        has_time: asked at rank 0 before each pair of hosts but the first.
    """
    first = [transport.hosts.index(host) for host in range(max(transport.hosts) + 1)]
    found = NetworkFigures(len(first))
    if len(first) > 1:
        _measure_between(transport, found, first, seconds, has_time)
    _measure_inside(transport, found, seconds)
    return found


def _measure_between(
    transport: Transport,
    found: NetworkFigures,
    first: Sequence[int],
    seconds: float,
    has_time: Callable[[], bool],
) -> None:
    """``first`` is the first rank of each host, which stands for it."""
    hosts = range(found.hosts)
    # Each host sends to the next one, then to the one after that, ...
    pairs = [(host, (host + step) % found.hosts) for step in hosts[1:] for host in hosts]
    streams = STREAMS * (len(pairs) + 1) + STREAMS * min(BOTH_WAYS, found.hosts)
    slot = min(LONGEST_SLOT, max(SHORTEST_SLOT, seconds / streams))
    delays: list[float] = []
    shares: list[float] = []
    for number, (a, b) in enumerate(pairs):
        if not broadcast(transport, number == 0 or has_time()):
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


def _measure_crowd(
    transport: Transport, found: NetworkFigures, first: Sequence[int], slot: float
) -> None:
    """All at once: each host sends to one that is far from it, and hears from another."""
    shift = max(1, found.hosts // 2)
    pairs = [(host, (host + shift) % found.hosts) for host in range(found.hosts)]
    flows = [(first[a], first[b]) for a, b in pairs]
    for pair, rate in zip(pairs, rates(transport, flows, slot), strict=False):
        found.at_once[pair] = _gbit(rate).value


def _measure_inside(transport: Transport, found: NetworkFigures, seconds: float) -> None:
    hosts = transport.hosts
    ranks = [[rank for rank, at in enumerate(hosts) if at == host] for host in range(found.hosts)]
    pairs = [(of_host[0], of_host[1]) for of_host in ranks if len(of_host) > 1][:LOCAL_HOSTS]
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
