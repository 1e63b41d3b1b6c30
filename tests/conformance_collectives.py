"""Requirements on the collectives of every engine; part of ``conformance.py``."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from aladdin_mpi.transport.base import Request, Transport

LARGE = 300_000
"""Items of a message that no MPI sends eagerly."""
TAG = 2000


def full(length: int, value: float) -> Tensor:
    return torch.full((length,), float(value))


def _values(rank: int, length: int) -> np.ndarray:
    """Return integers, whose sums are exact in any order."""
    return (np.arange(length) % 97 + 1.0) * (rank + 1)


def check_barrier(transport: Transport) -> None:
    """No rank leaves the barrier before all have entered it."""
    if transport.rank:
        request = transport.ibarrier()
        assert not transport.test(request)
        transport.wait(transport.isend(torch.zeros(1), 0, TAG))
        transport.wait(request)
        return
    for rank in range(1, transport.size):
        transport.wait(transport.irecv(torch.zeros(1), rank, TAG))
    transport.wait(transport.ibarrier())


def check_broadcast(transport: Transport) -> None:
    """From every root, small and large, of any dtype."""
    for root in range(transport.size):
        for length in (0, 1, 1000, LARGE):
            expected = torch.empty(length, dtype=torch.bfloat16)
            expected.copy_(torch.from_numpy(_values(root, length)))
            buffer = expected.clone() if transport.rank == root else torch.zeros_like(expected)
            transport.wait(transport.ibroadcast(buffer, root))
            assert torch.equal(buffer, expected)


def check_allreduce(transport: Transport) -> None:
    """Sum over all ranks, small and large, in place and out of place."""
    for dtype in (torch.float32, torch.float64, torch.int64):
        for length in (1, 1000, LARGE + 1):
            mine = torch.from_numpy(_values(transport.rank, length)).to(dtype)
            buffer, into = mine.clone(), torch.zeros_like(mine)
            transport.wait(transport.iallreduce(mine, into))
            transport.wait(transport.iallreduce(buffer))
            total = sum(_values(rank, length) for rank in range(transport.size))
            assert np.array_equal(into.double().numpy(), total)
            assert np.array_equal(buffer.double().numpy(), total)


def check_allreduce_same_bits(transport: Transport) -> None:
    """All ranks get the same bits, although floating-point addition is not associative."""
    for length in (1000, LARGE):
        generator = torch.Generator().manual_seed(transport.rank)
        buffer = torch.randn(length, generator=generator)
        transport.wait(transport.iallreduce(buffer))
        first = buffer.clone()
        transport.wait(transport.ibroadcast(first, 0))
        assert torch.equal(buffer, first)


def check_allreduce_refuses_half(transport: Transport) -> None:
    """MPI would silently add bfloat16 incorrectly."""
    for dtype in (torch.bfloat16, torch.float16):
        try:
            transport.iallreduce(torch.ones(4, dtype=dtype))
        except TypeError as error:
            assert str(dtype) in str(error)
        else:
            raise AssertionError(f"iallreduce took {dtype}")


def check_allgather(transport: Transport) -> None:
    """Gathers all ranks' buffers in rank order."""
    for length in (1, 1000, LARGE):
        mine = torch.from_numpy(_values(transport.rank, length)).float()
        gathered = torch.zeros(transport.size, length)
        transport.wait(transport.iallgather(mine, gathered))
        expected = np.stack([_values(rank, length) for rank in range(transport.size)])
        assert np.array_equal(gathered.numpy(), expected)


def check_alltoall(transport: Transport) -> None:
    """Rank i receives part i."""
    size = transport.size
    for length in (1, 1000, LARGE // 4):
        mine = torch.arange(size).repeat_interleave(length) + 100 * transport.rank
        received = torch.zeros_like(mine)
        transport.wait(transport.ialltoall(mine, received))
        expected = (100 * torch.arange(size)).repeat_interleave(length) + transport.rank
        assert torch.equal(received, expected)


def check_overlapping_collectives(transport: Transport) -> None:
    """Several collectives and messages are pending at once."""
    rank, size = transport.rank, transport.size
    total, root_value = full(LARGE, rank), full(1000, rank)
    mine, gathered = full(10, rank), torch.empty(10 * size)
    message = torch.empty(LARGE)
    receive = transport.irecv(message, (rank - 1) % size, TAG + 1)
    requests = [
        transport.iallreduce(total),
        transport.isend(full(LARGE, rank), (rank + 1) % size, TAG + 1),
        transport.ibarrier(),
        transport.ibroadcast(root_value, size - 1),
        transport.iallgather(mine, gathered),
    ]
    transport.sleep(0.01 * rank)
    transport.wait(receive, *reversed(requests))
    assert torch.equal(total, full(LARGE, sum(range(size))))
    assert torch.equal(root_value, full(1000, size - 1))
    assert torch.equal(gathered, torch.arange(size).float().repeat_interleave(10))
    assert torch.equal(message, full(LARGE, (rank - 1) % size))


def check_when_done(transport: Transport) -> None:
    """One collective follows another while the rank computes, or after the first has completed."""
    size, count = transport.size, 5
    gathered = [torch.zeros(size * LARGE) for _ in range(count)]
    requests: list[Request] = []

    def follow() -> None:
        if len(requests) < count:
            mine = full(LARGE, 10 * len(requests) + transport.rank)
            request = transport.iallgather(mine, gathered[len(requests)])
            requests.append(request)
            transport.when_done(request, follow)

    with transport.atomic():
        follow()
    for _ in range(500):
        if len(requests) == count and requests[-1].done:
            break
        transport.sleep(0.02)
    assert len(requests) == count and all(request.done for request in requests)
    for number, each in enumerate(gathered):
        expected = (10 * number + torch.arange(size)).float().repeat_interleave(LARGE)
        assert torch.equal(each, expected)
    told: list[bool] = []
    transport.when_done(requests[0], lambda: told.append(True))
    for _ in range(500):
        if told:
            break
        transport.sleep(0.02)
    transport.wait(transport.ibarrier())
    assert told == [True]


class FifthQuery:
    """An event that has happened when it is queried for the fifth time."""

    def __init__(self) -> None:
        self.looks = 0

    def query(self) -> bool:
        self.looks += 1
        return self.looks >= 5


def check_when_happened(transport: Transport) -> None:
    """Collectives start while the rank computes, each as soon as its event has happened."""
    totals = [full(LARGE, transport.rank + number) for number in range(3)]
    requests: list[Request] = []

    def start() -> None:
        requests.append(transport.iallreduce(totals[len(requests)]))

    for number in range(3):
        transport.when_done(FifthQuery(), start)
        for _ in range(500):
            if len(requests) > number and requests[-1].done:
                break
            transport.sleep(0.02)
    transport.wait(transport.ibarrier())
    assert len(requests) == 3 and all(request.done for request in requests)
    ranks = sum(range(transport.size))
    for number, total in enumerate(totals):
        assert torch.equal(total, full(LARGE, ranks + number * transport.size))


COLLECTIVE_CHECKS = (
    check_barrier,
    check_broadcast,
    check_allreduce,
    check_allreduce_same_bits,
    check_allreduce_refuses_half,
    check_allgather,
    check_alltoall,
    check_overlapping_collectives,
    check_when_done,
    check_when_happened,
)
