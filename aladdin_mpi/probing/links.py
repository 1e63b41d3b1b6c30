"""Measurements of the network: rates and latencies between hosts and inside a host.

The first rank of each host represents it.
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
"""Larger than a cache."""
HOST_REPEATS = 9
MESSAGES, BURST = 400, 8


def memory_bandwidth(seconds: float) -> Figure:
    """Return the memory bandwidth in GB/s of adding gradients: two are read, one is written.

    Raises:
        RuntimeError: insufficient memory.
    """
    total, gradient = (torch.ones(VECTOR_BYTES // 4) for _ in range(2))
    total.add_(gradient)  # maps the pages
    rates: list[float] = []
    end = time.perf_counter() + seconds
    while len(rates) < 3 or (len(rates) < HOST_REPEATS and time.perf_counter() < end):
        start = time.perf_counter()
        total.add_(gradient)
        rates.append(3e-9 * VECTOR_BYTES / (time.perf_counter() - start))
    return figure(rates)


def message_cost(transport: Transport) -> Figure:
    """Return the microseconds of this process per message sent or received, without its bytes.

    The process sends bursts to itself, so that the network has no effect.
    """
    costs = []
    for _ in range(MESSAGES // BURST):
        buffers = [torch.zeros(8, dtype=torch.uint8) for _ in range(2 * BURST)]
        start = transport.now()
        own = transport.rank
        receives = [transport.irecv(buffer, own, Tag.PROBE) for buffer in buffers[:BURST]]
        sends = [transport.isend(buffer, own, Tag.PROBE) for buffer in buffers[BURST:]]
        transport.wait(*receives, *sends)
        costs.append(1e6 * (transport.now() - start) / (2 * BURST))
    return figure(costs)


def spare_cores(transport: Transport, cores: int) -> tuple[int, int] | None:
    """Return, at rank 0, its host's cores that are not used by ranks, and all ``cores``."""
    threads = gather(transport, torch.get_num_threads())
    if not threads:
        return None
    used = sum(
        n for n, host in zip(threads, transport.hosts, strict=True) if host == transport.host
    )
    return max(0, cores - used), cores


Flow = tuple[int, int]
"""The sending and the receiving rank."""

FIRST_TRIAL, GROWTH = 64 * 1024, 4
"""Bytes of the first, shortest stream, and the growth factor of the next ones."""
LONG_ENOUGH = 1 / 3
"""Share of a stream's time that a trial must take to determine the length of streams."""
SMALLEST, LARGEST = 128 * 1024, 4_000_000
"""Bytes of a stream's messages; the largest is a bucket."""
FEWEST, MOST = 16, 1024
"""Number of messages of a stream."""
WINDOW = 2
"""Messages in flight. MPI may move them at the same time, piece by piece; with many, it would send
the beginnings of all first, as Open MPI announces a message with its first 64 KB."""
REPEATS = 3
WORD = 8
"""Bytes of a message whose latency is measured."""
ROUNDS = (5, 60)
"""Least and most messages with answers."""


class Length(NamedTuple):
    """The length of a stream: bytes per message, and number of messages."""

    nbytes: int
    messages: int


class FlowResult(NamedTuple):
    """The result of a flow: bytes/s, and seconds from start to end."""

    rate: float
    seconds: float


def rates(transport: Transport, flows: Sequence[Flow], slot: float) -> list[list[float]]:
    """Measure simultaneous flows several times, for about ``slot`` seconds each.

    Returns:
        The bytes/s of each flow, at rank 0; elsewhere an empty list.
    """
    length = _length(_long_enough(transport, flows, slot))
    streams = [_stream(transport, flows, length) for _ in range(REPEATS)]
    return [[result.rate for result in of_flow] for of_flow in zip(*streams, strict=True)]


def _long_enough(transport: Transport, flows: Sequence[Flow], slot: float) -> int:
    """Return the bytes of a stream of ``slot`` seconds; shorter ones would fit into queues."""
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
    """Run all flows once at the same time; return the results at rank 0."""
    barrier(transport)
    ends = {
        number: _End(transport, flow, length)
        for number, flow in enumerate(flows)
        if transport.rank in flow
    }
    while waiting := [end for end in ends.values() if end.in_flight]:
        waiting[transport.wait_any([end.in_flight[0] for end in waiting])].advance()
    own = [[n, *end.result()] for n, end in ends.items() if flows[n][1] == transport.rank]
    results = sorted(result for results in gather(transport, own) for result in results)
    return [FlowResult(rate, seconds) for _, rate, seconds in results]


class _End:
    """One end of a flow, with its messages in flight."""

    def __init__(self, transport: Transport, flow: Flow, length: Length) -> None:
        self._transport = transport
        source, dest = flow
        is_source = source == transport.rank
        self._post = transport.isend if is_source else transport.irecv
        self._other = dest if is_source else source
        self._length = length
        self._buffers = [torch.zeros(length.nbytes, dtype=torch.uint8) for _ in range(WINDOW)]
        self._begun = self._ended = 0
        self.in_flight: deque[Request] = deque()
        self._start = self._first = self._last = transport.now()
        for _ in range(WINDOW):
            self._begin()

    def _begin(self) -> None:
        if self._begun < self._length.messages:
            buffer = self._buffers[self._begun % WINDOW]
            self.in_flight.append(self._post(buffer, self._other, Tag.PROBE))
            self._begun += 1

    def advance(self) -> None:
        """Complete the oldest message, and post the next one."""
        self.in_flight.popleft()
        self._last = self._transport.now()
        self._ended += 1
        if self._ended == WINDOW:
            self._first = self._last
        self._begin()

    def result(self) -> FlowResult:
        """Return the rate from the end of the first window of messages to that of the last one."""
        nbytes = self._length.nbytes * (self._ended - WINDOW)
        return FlowResult(nbytes / max(self._last - self._first, 1e-9), self._last - self._start)


def latencies(transport: Transport, pair: Flow, seconds: float) -> list[float]:
    """Measure the latency of short messages: half the time of a message and its answer.

    Returns:
        Seconds of each message, at rank 0; elsewhere an empty list.
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
    delays: list[float] = []
    fewest, most = ROUNDS
    is_last = False
    while not is_last:
        is_last = len(delays) >= fewest and (len(delays) >= most or transport.now() > end)
        word, answer = torch.tensor([float(is_last)], dtype=torch.float64), torch.empty(WORD)
        begin = transport.now()
        receive = transport.irecv(answer, other, Tag.PROBE)
        transport.wait(transport.isend(word, other, Tag.PROBE), receive)
        delays.append((transport.now() - begin) / 2)
    return delays[1:]  # the first one may have established the connection


def _answer(transport: Transport, other: int) -> None:
    word = torch.zeros(1, dtype=torch.float64)
    while not word.item():
        transport.wait(transport.irecv(word, other, Tag.PROBE))
        transport.wait(transport.isend(torch.zeros(1, dtype=torch.float64), other, Tag.PROBE))


def message_seconds(transport: Transport, pair: Flow, rate: float, nbytes: int) -> float:
    """Return, at rank 0, a message's time in a stream beyond that of its bytes at ``rate`` bytes/s.

    This is the median of several streams, and negative if noise exceeds it.
    """
    streams = [_stream(transport, [pair], Length(nbytes, 200)) for _ in range(REPEATS)]
    if transport.rank:
        return 0.0
    return nbytes / median(result.rate for (result,) in streams) - nbytes / rate


DIFFERS = 0.1
"""Relative difference of rates above which a link is listed separately."""
ALIKE = 0.2
"""Relative difference of rates below which a host's pairs are limited by the same link."""
SHORT = 16 * 1024
"""Bytes of messages that measure the overhead per message; shorter ones may overtake others."""
LONGEST_SLOT, SHORTEST_SLOT = 0.3, 0.05
"""Seconds of a stream."""
STREAMS = 6
"""Time for a pair of hosts, with trials and latency, in units of streams."""
BOTH_WAYS = 4
"""Most pairs that send in both directions at once."""
LOCAL_HOSTS = 4
"""Most hosts inside which the path is measured."""


@dataclass
class NetworkFigures:
    """The network's rates in Gbit/s and times in microseconds; None or missing if not measured.

    Attributes:
        alone: rates by pairs of hosts (sender first), one pair at a time.
        together: rate of each direction if both are used at once, relative to one alone.
        at_once: rates by pairs of hosts, while all hosts send and receive.
        latency: of a short message between two hosts.
        overhead: time per message in addition to its bytes.
        skipped: number of pairs of hosts that were not measured for lack of time.
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
        """Return the rate of each host's link: that of its fastest pairs, as others limit the rest.

        It is the median of similar ones; the maximum would be a chance result.
        """
        rates_of: dict[int, list[float]] = {}
        for pair, rate in self.alone.items():
            for host in pair:
                rates_of.setdefault(host, []).append(rate.value)
        return {
            host: median(rate for rate in rates if rate > (1 - ALIKE) * max(rates))
            for host, rates in rates_of.items()
        }

    def crowded(self) -> Figure | None:
        """Return the hosts' rates while all hosts send, relative to a pair alone."""
        alone = self.host_rates()
        shares = [
            rate / min(alone[a], alone[b])
            for (a, b), rate in self.at_once.items()
            if a in alone and b in alone
        ]
        return figure(shares) if shares else None

    def usual_rate(self) -> Figure | None:
        """Return the usual rate of a link, with the spread over similar links."""
        rates = self.host_rates().values()
        if not rates:
            return None
        usual = median_high(rates)
        return figure([rate for rate in rates if abs(rate - usual) <= DIFFERS * usual])

    def other_links(self) -> dict[int, float]:
        """Return the rates of links that differ from the usual one, by host."""
        usual = self.usual_rate()
        if usual is None:
            return {}
        rates, most = self.host_rates().items(), DIFFERS * usual.value
        return {host: rate for host, rate in rates if abs(rate - usual.value) > most}


def measure_network(
    transport: Transport, seconds: float, has_time: Callable[[], bool]
) -> NetworkFigures:
    """Measure the network; the result is complete at rank 0.

    Args:
        transport: all ranks call it.
        seconds: approximate total time.
        has_time: called at rank 0 before each pair of hosts but the first.
    """
    first = [transport.hosts.index(host) for host in range(max(transport.hosts) + 1)]
    network = NetworkFigures(len(first))
    if len(first) > 1:
        _measure_between(transport, network, first, seconds, has_time)
    _measure_inside(transport, network, seconds)
    return network


def _measure_between(
    transport: Transport,
    network: NetworkFigures,
    first: Sequence[int],
    seconds: float,
    has_time: Callable[[], bool],
) -> None:
    """Measure between hosts; ``first`` has the first rank of each."""
    hosts = range(network.hosts)
    # Each host sends to the next one, then to the second next, ...
    pairs = [(host, (host + step) % network.hosts) for step in hosts[1:] for host in hosts]
    streams = STREAMS * (len(pairs) + 1) + STREAMS * min(BOTH_WAYS, network.hosts)
    slot = min(LONGEST_SLOT, max(SHORTEST_SLOT, seconds / streams))
    delays: list[float] = []
    shares: list[float] = []
    for number, (a, b) in enumerate(pairs):
        if not broadcast(transport, number == 0 or has_time()):
            network.skipped = len(pairs) - number
            break
        flow = first[a], first[b]
        delays += latencies(transport, flow, slot / 3)
        for rate in rates(transport, [flow], slot):
            network.alone[a, b] = _gbit(rate)
        if number < BOTH_WAYS and a < b:
            for way in rates(transport, [flow, flow[::-1]], slot):
                shares.append(_gbit(way).value / network.alone[a, b].value)
    _measure_crowd(transport, network, first, slot)
    one = network.alone.get((0, 1))
    # Only rank 0 has the rate, and only its result is used.
    row = message_seconds(transport, (first[0], first[1]), one.value / 8e-9 if one else 1.0, SHORT)
    if transport.rank == 0:
        network.latency = figure([1e6 * delay for delay in delays])
        network.together = figure(shares)
        network.overhead = max(0.0, 1e6 * row)


def _measure_crowd(
    transport: Transport, network: NetworkFigures, first: Sequence[int], slot: float
) -> None:
    """Measure all hosts at once: each sends to a distant host, and receives from another."""
    shift = max(1, network.hosts // 2)
    pairs = [(host, (host + shift) % network.hosts) for host in range(network.hosts)]
    flows = [(first[a], first[b]) for a, b in pairs]
    for pair, rate in zip(pairs, rates(transport, flows, slot), strict=False):
        network.at_once[pair] = _gbit(rate).value


def _measure_inside(transport: Transport, network: NetworkFigures, seconds: float) -> None:
    hosts = transport.hosts
    ranks = [[rank for rank, at in enumerate(hosts) if at == host] for host in range(network.hosts)]
    pairs = [(of_host[0], of_host[1]) for of_host in ranks if len(of_host) > 1][:LOCAL_HOSTS]
    slot = min(LONGEST_SLOT, max(SHORTEST_SLOT, seconds / (4 * LOCAL_HOSTS)))
    delays: list[float] = []
    inside: list[float] = []
    for pair in pairs:
        delays += latencies(transport, pair, slot / 3)
        inside += [rate for flow in rates(transport, [pair], slot) for rate in flow]
    if delays:
        network.local_latency = figure([1e6 * delay for delay in delays])
        network.local_rate = _gbit(inside)


def _gbit(bytes_per_second: Sequence[float]) -> Figure:
    return figure(bytes_per_second).scaled(8e-9)
