"""Messages that are only timed: streams from rank to rank, and messages and their answers.

All ranks take part in each call, those that neither send nor receive by waiting for the others.
A stream's rate is that of what comes behind its first messages, so that neither the latency nor
unlike starts nor what queues take at once count. The figures come together at rank 0, which decides
how long the next one is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch

from aladdin_mpi.control.barrier import barrier
from aladdin_mpi.control.exchange import broadcast, gather
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.request import Request

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


class Passed(NamedTuple):
    """One flow of a stream: bytes/s, and seconds from its start to its end."""

    rate: float
    seconds: float


def rates(transport: Transport, flows: Sequence[Flow], slot: float) -> list[list[float]]:
    """Bytes/s of each flow, all of them at the same time; several times, about ``slot`` s each.

    At rank 0; elsewhere empty.
    """
    length = _length(_long_enough(transport, flows, slot))
    found = [_stream(transport, flows, length) for _ in range(REPEATS)]
    return [[passed.rate for passed in of_flow] for of_flow in zip(*found, strict=True)]


def _long_enough(transport: Transport, flows: Sequence[Flow], slot: float) -> int:
    """Bytes of a stream that takes ``slot`` seconds. Short ones say little: queues take them."""
    total, is_known = FIRST_TRIAL, False
    while not is_known:
        passed = _stream(transport, flows, _length(total))
        longest = max((each.seconds for each in passed), default=0.0)
        is_known = longest >= slot * LONG_ENOUGH or total >= LARGEST * MOST
        after = round(total * slot / longest) if is_known and longest else total * GROWTH
        total, is_known = broadcast(transport, (after, is_known))
    return total


def _length(total: int) -> Length:
    nbytes = min(LARGEST, max(SMALLEST, total // FEWEST))
    messages = min(MOST, max(FEWEST, total // nbytes))
    return Length(nbytes, messages - messages % WINDOW)


def _stream(transport: Transport, flows: Sequence[Flow], length: Length) -> list[Passed]:
    """Each flow once, all at the same time; at rank 0."""
    barrier(transport)
    ends = {
        number: _End(transport, flow, length)
        for number, flow in enumerate(flows)
        if transport.rank in flow
    }
    while waiting := [end for end in ends.values() if end.under_way]:
        waiting[transport.wait_any([end.under_way[0] for end in waiting])].advance()
    own = {
        str(number): end.passed()
        for number, end in ends.items()
        if flows[number][1] == transport.rank
    }
    told: dict[str, tuple[float, float]] = {}
    for each in gather(transport, own):
        told |= each
    return [Passed(*told[str(number)]) for number in range(len(flows))] if told else []


class _End:
    """One end of a flow, with the messages that are under way."""

    def __init__(self, transport: Transport, flow: Flow, length: Length) -> None:
        self._transport = transport
        source, dest = flow
        self._post = transport.isend if source == transport.rank else transport.irecv
        self._other = dest if source == transport.rank else source
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

    def passed(self) -> Passed:
        """From the end of the first messages that were under way to that of the last one."""
        behind = self._length.nbytes * (self._ended - WINDOW)
        return Passed(behind / max(self._last - self._first, 1e-9), self._last - self._start)


def latencies(transport: Transport, pair: Flow, seconds: float) -> list[float]:
    """Seconds that a short message takes, half of a message and its answer, some times.

    At rank 0; elsewhere empty.
    """
    barrier(transport)
    asker, answerer = pair
    own: list[float] = []
    if transport.rank == asker:
        own = _ask(transport, answerer, seconds)
    elif transport.rank == answerer:
        _answer(transport, asker)
    return next((each for each in gather(transport, own) if each), [])


def _ask(transport: Transport, other: int, seconds: float) -> list[float]:
    start = transport.now()
    found: list[float] = []
    fewest, most = ROUNDS
    is_last = False
    while not is_last:
        is_last = len(found) >= fewest and (len(found) >= most or transport.now() - start > seconds)
        word, answer = torch.tensor([float(is_last)], dtype=torch.float64), torch.empty(WORD)
        begin = transport.now()
        receive = transport.irecv(answer, other, Tag.PROBE)
        transport.wait_all([transport.isend(word, other, Tag.PROBE), receive])
        found.append((transport.now() - begin) / 2)
    return found[1:]  # the first one may have made the connection


def _answer(transport: Transport, other: int) -> None:
    word = torch.zeros(1, dtype=torch.float64)
    while not word.item():
        transport.wait(transport.irecv(word, other, Tag.PROBE))
        transport.wait(transport.isend(torch.zeros(1, dtype=torch.float64), other, Tag.PROBE))


def message_seconds(transport: Transport, pair: Flow, rate: float, nbytes: int) -> float:
    """What a message in a row of them takes beyond its bytes at ``rate`` bytes/s; at rank 0.

    Of several rows the median. Below zero where it cannot be told from noise.
    """
    length = Length(nbytes, 200)
    found = [_stream(transport, [pair], length) for _ in range(REPEATS)]
    if transport.rank:
        return 0.0
    each = nbytes / median(passed.rate for (passed,) in found)
    return each - nbytes / rate
