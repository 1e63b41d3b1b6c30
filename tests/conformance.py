"""Requirements on every engine, checked by all ranks together.

Every rank of a transport runs each check. The checks work for any number of ranks, in simulated and
in real time: they sleep for at most 0.2 s at a time and make no assertions about times.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from aladdin_mpi.transport.base import ANY_SOURCE, Transport
from tests.conformance_collectives import COLLECTIVE_CHECKS, LARGE, full

CHECKS: dict[str, Callable[[Transport], None]] = {}
"""Checks by name."""


def _listed(check: Callable[[Transport], None]) -> Callable[[Transport], None]:
    CHECKS[check.__name__.removeprefix("check_")] = check
    return check


def run_all(transport: Transport) -> None:
    """Run every check on all ranks together."""
    for check in CHECKS.values():
        transport.wait(transport.ibarrier())
        check(transport)


def _tag(check: int, number: int = 0) -> int:
    return 1000 + 10 * check + number


# -- point to point ---------------------------------------------------------------
@_listed
def check_order_within_tag(transport: Transport) -> None:
    """Small and large messages with one tag arrive in the order of sending."""
    dest, source = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    lengths = [3, LARGE, 5, LARGE, 0, 7]
    sends = [transport.isend(full(length, i), dest, _tag(0)) for i, length in enumerate(lengths)]
    for i, length in enumerate(lengths):
        buffer = torch.empty(LARGE)
        request = transport.irecv(buffer, source, _tag(0))
        transport.wait(request)
        assert (request.source, request.nbytes) == (source, 4 * length)
        assert torch.equal(buffer[:length], full(length, i))
    transport.wait(*sends)


@_listed
def check_tags_are_matched_separately(transport: Transport) -> None:
    """A receive takes only messages with its tag, whatever arrived before."""
    dest, source = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    sends = [transport.isend(full(4, tag), dest, _tag(1, tag)) for tag in range(3)]
    for tag in (2, 0, 1):
        buffer = torch.empty(4)
        transport.wait(transport.irecv(buffer, source, _tag(1, tag)))
        assert torch.equal(buffer, full(4, tag))
    transport.wait(*sends)


@_listed
def check_posted_receives(transport: Transport) -> None:
    """Several receives for one (source, tag) are filled in the order of posting."""
    dest, source = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    buffers = [torch.empty(LARGE) for _ in range(4)]
    receives = [transport.irecv(buffer, source, _tag(2)) for buffer in buffers]
    transport.wait(transport.ibarrier())
    sends = [transport.isend(full(LARGE, i), dest, _tag(2)) for i in range(4)]
    transport.wait(*receives + sends)
    assert [buffer[-1].item() for buffer in buffers] == [0, 1, 2, 3]
    assert sorted(receives, key=lambda request: request.order) == receives


@_listed
def check_any_source(transport: Transport) -> None:
    """ANY_SOURCE takes one message from every rank, and reports the source."""
    if transport.rank:
        transport.wait(transport.isend(full(8, transport.rank), 0, _tag(3)))
        return
    sources = []
    for _ in range(transport.size - 1):
        buffer = torch.empty(8)
        request = transport.irecv(buffer, ANY_SOURCE, _tag(3))
        transport.wait(request)
        assert torch.equal(buffer, full(8, request.source))
        sources.append(request.source)
    assert sorted(sources) == list(range(1, transport.size))


@_listed
def check_any_source_among_others(transport: Transport) -> None:
    """Receives from any source and from a given source are filled in the order of posting."""
    rank = transport.rank
    for tag, sources in ((19, (ANY_SOURCE, rank)), (20, (rank, ANY_SOURCE))):
        buffers = [torch.empty(1), torch.empty(1)]
        receives = [
            transport.irecv(buffer, source, _tag(tag))
            for buffer, source in zip(buffers, sources, strict=True)
        ]
        sends = [transport.isend(full(1, i), rank, _tag(tag)) for i in range(2)]
        transport.wait(*receives + sends)
        assert [buffer.item() for buffer in buffers] == [0, 1]


@_listed
def check_wait_any_order(transport: Transport) -> None:
    """If several requests have completed, wait_any returns the one that completed first."""
    if transport.size < 2 or transport.rank > 1:
        return
    go = torch.zeros(1)
    if transport.rank == 1:
        transport.wait(transport.isend(full(1, 1), 0, _tag(4, 1)))
        transport.wait(transport.irecv(go, 0, _tag(4, 0)))
        transport.wait(transport.isend(full(1, 2), 0, _tag(4, 2)))
        return
    early = transport.irecv(torch.empty(1), 1, _tag(4, 1))
    late = transport.irecv(torch.empty(1), 1, _tag(4, 2))
    assert transport.wait_any([late, early]) == 1
    transport.wait(transport.isend(go, 1, _tag(4, 0)))
    transport.wait(late)
    assert early.order < late.order
    assert transport.wait_any([late, early]) == 1
    assert transport.wait_any([late]) == 0


@_listed
def check_wait_any_timeout(transport: Transport) -> None:
    """wait_any returns -1 after its timeout, and the receive stays posted."""
    buffer = torch.empty(1)
    request = transport.irecv(buffer, transport.rank, _tag(5))
    assert transport.wait_any([request], timeout=0.02) == -1
    assert not transport.test(request)
    send = transport.isend(full(1, 5), transport.rank, _tag(5))
    assert transport.wait_any([request], timeout=100.0) == 0
    assert buffer.item() == 5
    transport.wait(send)


@_listed
def check_wait_set(transport: Transport) -> None:
    """A set returns requests in the order of completion, including replacements."""
    if transport.rank:
        for number in range(3):
            transport.wait(transport.isend(full(1, number), 0, _tag(30)))
        return
    awaited = transport.wait_set()
    buffers = {rank: torch.empty(1) for rank in range(1, transport.size)}
    for rank, buffer in buffers.items():
        awaited.put(rank, transport.irecv(buffer, rank, _tag(30)))
    seen: dict[int, list[float]] = {rank: [] for rank in buffers}
    orders = []
    while awaited.requests:
        name = awaited.wait()
        assert name is not None
        rank = name
        assert awaited.wait() == rank, "it stays until it is replaced"
        orders.append(awaited.requests[rank].order)
        seen[rank].append(buffers[rank].item())
        if len(seen[rank]) < 3:
            awaited.put(rank, transport.irecv(buffers[rank], rank, _tag(30)))
        else:
            awaited.drop(rank)
    assert orders == sorted(orders)
    assert all(values == [0, 1, 2] for values in seen.values())


@_listed
def check_wait_set_timeout(transport: Transport) -> None:
    """The wait for a set returns None after its timeout, and the receive stays posted."""
    awaited = transport.wait_set()
    buffer = torch.empty(1)
    awaited.put(3, transport.irecv(buffer, transport.rank, _tag(31)))
    assert awaited.wait(timeout=0.02) is None
    send = transport.isend(full(1, 5), transport.rank, _tag(31))
    assert awaited.wait(timeout=100.0) == 3
    assert awaited.wait(timeout=0.0) == 3
    assert buffer.item() == 5
    transport.wait(send)


@_listed
def check_larger_receive_buffer(transport: Transport) -> None:
    """A message may be shorter than its buffer, whose remaining values are unchanged."""
    dest, source = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    buffer = full(10, -1)
    request = transport.irecv(buffer, source, _tag(6))
    transport.wait(transport.isend(full(4, 9), dest, _tag(6)))
    transport.wait(request)
    assert request.nbytes == 16
    assert buffer.tolist() == [9] * 4 + [-1] * 6


@_listed
def check_zero_length(transport: Transport) -> None:
    """An empty message is delivered."""
    dest, source = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    request = transport.irecv(torch.empty(0), source, _tag(7))
    transport.wait(transport.isend(torch.empty(0), dest, _tag(7)))
    transport.wait(request)
    assert (request.source, request.nbytes) == (source, 0)


@_listed
def check_self_send(transport: Transport) -> None:
    """A rank can send to itself, small and large."""
    for length in (2, LARGE):
        buffer = torch.empty(length)
        request = transport.irecv(buffer, transport.rank, _tag(8))
        send = transport.isend(full(length, 3), transport.rank, _tag(8))
        transport.wait(request, send)
        assert request.source == transport.rank
        assert torch.equal(buffer, full(length, 3))


@_listed
def check_server_and_workers(transport: Transport) -> None:
    """A server with one posted receive per worker answers all workers."""
    rounds = 3
    if transport.rank:
        for turn in range(rounds):
            answer = torch.empty(LARGE)
            receive = transport.irecv(answer, 0, _tag(9, 1))
            question = full(LARGE, transport.rank + 10 * turn)
            transport.wait(transport.isend(question, 0, _tag(9)), receive)
            assert answer[-1].item() == question[0].item() + 0.5
        return
    turns = dict.fromkeys(range(1, transport.size), 0)
    buffers = {rank: torch.empty(LARGE) for rank in turns}
    receives = {rank: transport.irecv(buffers[rank], rank, _tag(9)) for rank in turns}
    while receives:
        rank = list(receives)[transport.wait_any(list(receives.values()))]
        assert buffers[rank][0].item() == rank + 10 * turns[rank]
        transport.wait(transport.isend(buffers[rank] + 0.5, rank, _tag(9, 1)))
        turns[rank] += 1
        if turns[rank] < rounds:
            receives[rank] = transport.irecv(buffers[rank], rank, _tag(9))
        else:
            del receives[rank]
    assert set(turns.values()) <= {rounds}


@_listed
def check_exchange_of_large_messages(transport: Transport) -> None:
    """All ranks send to all others at once, receives posted first."""
    others = [rank for rank in range(transport.size) if rank != transport.rank]
    buffers = {rank: torch.empty(LARGE) for rank in others}
    requests = [transport.irecv(buffers[rank], rank, _tag(10)) for rank in others]
    mine = full(LARGE, transport.rank)
    requests += [transport.isend(mine, rank, _tag(10)) for rank in others]
    transport.wait(*requests)
    for rank in others:
        assert torch.equal(buffers[rank], full(LARGE, rank))


@_listed
def check_half_precision_payload(transport: Transport) -> None:
    """bfloat16 values arrive bit-identical, including NaN and infinity."""
    dest, source = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    buffer = torch.zeros(2**16, dtype=torch.bfloat16)
    receive = transport.irecv(buffer, source, _tag(11))
    transport.wait(transport.isend(bits.view(torch.bfloat16), dest, _tag(11)), receive)
    assert torch.equal(buffer.view(torch.int16), bits)


@_listed
def check_mixed_dtypes(transport: Transport) -> None:
    """Bytes are sent, whatever the dtypes at both ends."""
    dest, source = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    numbers = torch.tensor([[1.5, -2.0], [3.0, float("inf")]], dtype=torch.float64)
    buffer = torch.zeros(32, dtype=torch.uint8)
    receive = transport.irecv(buffer, source, _tag(12))
    transport.wait(transport.isend(numbers, dest, _tag(12)), receive)
    assert torch.equal(buffer.view(torch.float64).view(2, 2), numbers)


@_listed
def check_cancel(transport: Transport) -> None:
    """A cancelled receive takes no message: the next receive gets it."""
    dest, source = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    given_up, kept = full(4, -1), full(4, -1)
    request = transport.irecv(given_up, source, _tag(13))
    transport.cancel(request)
    receive = transport.irecv(kept, source, _tag(13))
    transport.wait(transport.ibarrier())
    transport.wait(transport.isend(full(4, 6), dest, _tag(13)), receive)
    assert torch.equal(kept, full(4, 6))
    assert torch.equal(given_up, full(4, -1))


@_listed
def check_traffic(transport: Transport) -> None:
    """Bytes and messages are counted at both ends, and waiting time is measured."""
    dest, source = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    traffic = transport.traffic
    before = (traffic.bytes_sent, traffic.messages_sent)
    received = (traffic.bytes_received, traffic.messages_received)
    waited = traffic.waiting
    lengths = [25, LARGE, 0]
    requests = [transport.irecv(torch.empty(LARGE), source, _tag(14)) for _ in lengths]
    requests += [transport.isend(torch.ones(length), dest, _tag(14)) for length in lengths]
    transport.wait(*requests)
    nbytes = 4 * sum(lengths)
    assert (traffic.bytes_sent - before[0], traffic.messages_sent - before[1]) == (nbytes, 3)
    assert (traffic.bytes_received - received[0], traffic.messages_received - received[1]) == (
        nbytes,
        3,
    )
    assert traffic.waiting > waited


class _Switch:
    """An event that happens when the test sets it."""

    def __init__(self) -> None:
        self.on = False

    def query(self) -> bool:
        return self.on


@_listed
def check_send_after_event(transport: Transport) -> None:
    """A send waits for its event, then reads its buffer, and keeps the order of its tag."""
    dest, source = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    for length in (4, LARGE):
        event, buffer = _Switch(), full(length, -1)
        first, second, other = torch.empty(length), torch.empty(length), torch.empty(1)
        receives = [
            transport.irecv(first, source, _tag(15)),
            transport.irecv(second, source, _tag(15)),
        ]
        pass_by = transport.irecv(other, source, _tag(15, 1))
        sends = [
            transport.isend(buffer, dest, _tag(15), after=event),
            transport.isend(full(length, 2), dest, _tag(15)),
            transport.isend(full(1, 3), dest, _tag(15, 1)),
        ]
        transport.wait(pass_by)
        assert not transport.test(sends[0])
        transport.sleep(0.01)
        buffer.fill_(1)
        event.on = True
        transport.wait(*receives + sends)
        assert torch.equal(first, full(length, 1))
        assert torch.equal(second, full(length, 2))


# -- messages that interrupt --------------------------------------------------------
@_listed
def check_handler_during_sleep(transport: Transport) -> None:
    """While rank 0 computes, its message handler answers the other ranks."""
    seen: list[int] = []
    answers: list[tuple[Tensor, object]] = []

    def answer(source: int, message: Tensor) -> None:
        assert message.dtype == torch.uint8
        seen.append(source)
        reply = message.clone() + 1
        answers.append((reply, transport.isend(reply, source, _tag(16, 1))))

    transport.on_message(_tag(16), 16, answer)
    transport.wait(transport.ibarrier())
    if transport.rank == 0:
        for _ in range(100):
            if len(seen) == transport.size - 1:
                break
            transport.sleep(0.2)
        assert sorted(seen) == list(range(1, transport.size))
    else:
        question = torch.full((8,), transport.rank, dtype=torch.uint8)
        reply = torch.zeros(8, dtype=torch.uint8)
        receive = transport.irecv(reply, 0, _tag(16, 1))
        transport.wait(transport.isend(question, 0, _tag(16)), receive)
        assert torch.equal(reply, question + 1)
    transport.wait(transport.ibarrier())


@_listed
def check_handler_keeps_order(transport: Transport) -> None:
    """Messages of one sender reach the handler in order, whatever their lengths."""
    seen: list[tuple[int, int]] = []
    transport.on_message(
        _tag(17), 1000, lambda source, message: seen.append((source, message.numel()))
    )
    transport.wait(transport.ibarrier())
    dest, source = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    lengths = [10, 0, 1000, 1, 500, 7, 8, 9]
    sends = [transport.isend(torch.zeros(n, dtype=torch.uint8), dest, _tag(17)) for n in lengths]
    transport.wait(*sends)
    for _ in range(100):
        if len(seen) == len(lengths):
            break
        transport.sleep(0.02)
    assert seen == [(source, length) for length in lengths]


@_listed
def check_atomic(transport: Transport) -> None:
    """A handler never runs inside an atomic section."""
    pair = [0, 0]
    equal: list[bool] = []
    transport.on_message(_tag(18), 8, lambda source, message: equal.append(pair[0] == pair[1]))
    transport.wait(transport.ibarrier())
    count = 20
    others = [rank for rank in range(transport.size) if rank != transport.rank]
    sends = []
    for _ in range(count):
        sends += [transport.isend(torch.zeros(1), rank, _tag(18)) for rank in others]
        for _ in range(50):
            with transport.atomic():
                pair[0] += 1
                pair[1] += 1
        transport.sleep(0.0005)
    transport.wait(*sends)
    for _ in range(100):
        if len(equal) == count * len(others):
            break
        transport.sleep(0.02)
    assert equal == [True] * (count * len(others))


# -- other ------------------------------------------------------------------------
@_listed
def check_time_advances(transport: Transport) -> None:
    """A sleep takes at least its duration."""
    start = transport.now()
    transport.sleep(0.02)
    assert transport.now() - start >= 0.019


@_listed
def check_description(transport: Transport) -> None:
    """Rank, size and hosts match those of a job without failures."""
    assert 0 <= transport.rank < transport.size == len(transport.hosts)
    assert transport.host == transport.hosts[transport.rank]
    assert transport.failed == frozenset()
    ranks = torch.empty(transport.size, dtype=torch.int64)
    transport.wait(transport.iallgather(torch.tensor([transport.rank]), ranks))
    assert ranks.tolist() == list(range(transport.size))


for _check in COLLECTIVE_CHECKS:
    _listed(_check)
