"""Queues of pending requests in the MPI engine."""

from __future__ import annotations

import torch

from aladdin_mpi.transport.base import ANY_SOURCE
from aladdin_mpi.transport.mpi.requests import SMALL, MpiRequest, PendingRequests


def receive(peer: int, tag: int = 1) -> MpiRequest:
    return MpiRequest("receive", None, True, peer, tag)


def send(peer: int, tag: int = 1) -> MpiRequest:
    return MpiRequest("send", None, False, peer, tag)


def pending(*requests: MpiRequest) -> PendingRequests:
    lines = PendingRequests()
    for request in requests:
        lines.add(request)
    return lines


def test_pending_queue_tests_only_its_first_request() -> None:
    first, second = receive(1), receive(1)
    others = [receive(2), receive(ANY_SOURCE), receive(1, tag=2), send(1)]
    lines = pending(first, second, *others)
    assert lines.firsts() == [first, *others]
    assert lines.handles() == [request.handle for request in lines.firsts()]
    assert len(lines) == 6
    assert lines.before(receive(1)) == [first, second]


def test_pending_collectives_complete_in_any_order() -> None:
    collectives = [MpiRequest("Ibarrier", None, False) for _ in range(3)]
    lines = pending(*collectives)
    assert lines.firsts() == collectives
    collectives[1].done = True
    lines.drop_ended()
    assert lines.firsts() == [collectives[0], collectives[2]]


def test_pending_queue_tests_next_request_after_first_completes() -> None:
    line = [receive(1) for _ in range(4)]
    lines = pending(*line)
    line[1].done = True  # out of order: stays until the first has completed
    lines.drop_ended()
    assert lines.firsts() == [line[0]]
    line[0].done = True
    lines.drop_ended()
    assert lines.firsts() == [line[2]]
    line[2].done = line[3].done = True
    lines.drop_ended()
    assert lines.firsts() == []
    assert len(lines) == 0


def test_pending_queue_tests_request_added_after_all_completed() -> None:
    old, new = receive(1), receive(1)
    lines = pending(old)
    assert lines.firsts() == [old]
    old.done = True
    lines.drop_ended()
    lines.add(new)
    assert lines.firsts() == [new]
    lines.remove(new)
    assert lines.firsts() == []


def test_pending_queue_drops_completed_requests_at_any_position() -> None:
    line = [send(1) for _ in range(5)]
    lines = pending(*line)
    for request in line[1::2]:
        request.done = True
    lines.drop_all_ended()
    assert list(lines) == line[0::2]
    assert lines.firsts() == [line[0]]


def test_pending_is_idle_with_small_receives_only() -> None:
    small = MpiRequest("receive", torch.empty(SMALL, dtype=torch.uint8), True, 1)
    large = MpiRequest("receive", torch.empty(SMALL + 1, dtype=torch.uint8), True, 2)
    tiny_send = MpiRequest("send", torch.empty(1), False, 1)
    assert pending().is_idle
    assert pending(small).is_idle
    for busy in (large, tiny_send, MpiRequest("Ibarrier", None, False)):
        lines = pending(small, busy)
        assert not lines.is_idle
        busy.done = True
        lines.drop_all_ended()
        assert lines.is_idle
