"""Contenders of `benchmarks.peers` without computing: implementations of a sum over all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from mpi4py import MPI

# isort: split
import torch
import torch.distributed as dist
from torch import Tensor

from aladdin_mpi.allreduce import choose
from aladdin_mpi.flat.layout import BYTES_PER_MB, BYTES_PER_VALUE
from aladdin_mpi.transport.mpi.engine import MpiTransport
from benchmarks.programs.contenders import TIMEOUT, gloo, horovod

Sum = Callable[[Tensor], Iterable[Tensor]]
"""Sums a vector over all ranks, possibly in place, and returns the parts of the sum."""


@contextmanager
def bare_mpi(bucket_mb: float) -> Iterator[Sum]:
    """Return mpi4py's ``Allreduce``: one call for the whole vector, which spins."""

    def sum_up(vector: Tensor) -> list[Tensor]:
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, [vector.numpy(), MPI.FLOAT])
        return [vector]

    yield sum_up


@contextmanager
def bare_gloo(bucket_mb: float) -> Iterator[Sum]:
    """Return ``torch.distributed.all_reduce`` of the whole vector."""
    with gloo():

        def sum_up(vector: Tensor) -> list[Tensor]:
            dist.all_reduce(vector)
            return [vector]

        yield sum_up


@contextmanager
def bare_horovod(bucket_mb: float) -> Iterator[Sum]:
    """Return ``horovod.torch.allreduce_`` of the whole vector."""
    with horovod() as hvd:
        yield lambda vector: [hvd.allreduce_(vector, op=hvd.Sum, name="vector")]


def ours(backend: str) -> Any:
    """Return AR-SGD's sum: bucket by bucket, all started before waiting for the first."""

    @contextmanager
    def opened(bucket_mb: float) -> Iterator[Sum]:
        transport = MpiTransport(timeout=TIMEOUT)
        reducer = choose.make(backend, transport, torch.device("cpu"))
        values = int(bucket_mb * BYTES_PER_MB) // BYTES_PER_VALUE

        def sum_up(vector: Tensor) -> list[Tensor]:
            pending = [reducer.start(part, key) for key, part in enumerate(vector.split(values))]
            return [one.wait() for one in pending]

        yield sum_up
        reducer.close()
        transport.close()

    return opened


SUMS: dict[str, Any] = {
    "mpi": ours("mpi"),
    "horovod": ours("horovod"),
    "torch": ours("torch"),
    "Allreduce": bare_mpi,
    "all_reduce": bare_gloo,
    "hvd allreduce": bare_horovod,
}


def seconds(who: str, megabytes: float, bucket_mb: float, warm_up: int, times: int) -> float:
    """Return the mean seconds of one sum on this rank.

    Raises:
        AssertionError: the sum is wrong.
    """
    world = MPI.COMM_WORLD
    vector = torch.zeros(int(megabytes * BYTES_PER_MB) // BYTES_PER_VALUE)
    with SUMS[who](bucket_mb) as sum_up:
        total = torch.cat(list(sum_up(vector.fill_(1.0))))
        assert total.min() == total.max() == world.size, f"{who} returned a wrong sum"
        vector.zero_()  # repeated sums would soon be infinite
        for _ in range(warm_up):
            sum_up(vector)
        world.Barrier()
        start = time.perf_counter()
        for _ in range(times):
            sum_up(vector)
        return (time.perf_counter() - start) / times
