"""What one rank can measure alone: memory, the cost of a message, cores."""

from __future__ import annotations

import time

import torch

from aladdin_mpi.control.exchange import gather
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.probing.figures import Figure, figure
from aladdin_mpi.transport.base import Transport

VECTOR_BYTES = 64_000_000
"""More than a cache holds."""
REPEATS = 9
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
    while len(found) < 3 or (len(found) < REPEATS and time.perf_counter() < end):
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
        transport.wait_all([*receives, *sends])
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
