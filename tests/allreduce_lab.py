"""Requirements on every all-reduce, over MPI and in simulation; every rank runs them."""

from __future__ import annotations

import torch
from torch import Tensor

from aladdin_mpi.allreduce.base import AllReduce
from aladdin_mpi.transport.base import Transport

SIZES = (1, 2, 7, 33, 1000, 70_001)
"""Bucket lengths: fewer values than ranks, not divisible by the number of ranks, and more than any
MPI sends eagerly.
"""


def part(rank: int, key: int, turn: int, numel: int) -> Tensor:
    """Return a rank's contribution to a bucket: multiples of 1/4, exact in bf16."""
    return ((torch.arange(numel) + 3 * key + turn) % 5 + rank % 3) / 4


def expected(ranks: int, key: int, turn: int, numel: int) -> Tensor:
    return sum((part(rank, key, turn, numel) for rank in range(ranks)), torch.zeros(numel))


def sums_are_right(transport: Transport, reducer: AllReduce, turns: int = 3) -> None:
    """Check sums of several concurrent buckets, with ranks out of step, twice."""
    for turn in range(turns):
        flat = torch.cat([part(transport.rank, k, turn, n) for k, n in enumerate(SIZES)])
        buckets = list(flat.split(list(SIZES)))
        pending = []
        for key, bucket in enumerate(buckets):
            transport.sleep(0.002 * ((transport.rank + key + turn) % 3))
            pending.append(reducer.start(bucket, key))
        for key, one in enumerate(pending):
            assert torch.equal(one.wait(), expected(transport.size, key, turn, SIZES[key]))


def rounds_alike(transport: Transport, reducer: AllReduce) -> None:
    """Check that all ranks get the same bits, even if sums have to be rounded."""
    values = torch.randn(10_001, generator=torch.Generator().manual_seed(transport.rank))
    exact = values.double()
    total = reducer.start(values, 0).wait()
    transport.wait(transport.iallreduce(exact))
    first = total.clone()
    transport.wait(transport.ibroadcast(first, 0))
    assert torch.equal(total, first)
    # Each of the n values is rounded to 8 bits, and so is the sum, which is about sqrt(n).
    assert (total - exact).abs().max() < 0.05 * transport.size
