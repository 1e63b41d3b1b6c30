"""Whether messages move while a rank computes, and what that costs its computing."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from aladdin_mpi.control.barrier import barrier
from aladdin_mpi.control.exchange import gather
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.probing.streams import Flow, Length
from aladdin_mpi.transport.base import Transport

SECONDS, BYTES = 0.2, 64_000_000
"""That what is sent takes alone, and has, at most."""
LONGER = 1.5
"""By what factor both ranks compute longer than that takes alone."""
SMALLEST, LARGEST = 64 * 1024, 4_000_000
"""Bytes of a message."""
SIDE = 128


@dataclass(frozen=True)
class Overlap:
    """How far messages and computing go on beside each other.

    Attributes:
        moved: share of the bytes that had moved when computing ended.
        slower: share of the computing that the messages cost.
    """

    moved: float
    slower: float


def measure_overlap(transport: Transport, pair: Flow, rate: float) -> Overlap | None:
    """Send from one to the other while both compute; at rank 0, None elsewhere.

    Args:
        transport: all ranks call it.
        pair: two ranks.
        rate: bytes/s of a stream between them while nobody computes.
    """
    total = min(BYTES, rate * SECONDS)
    nbytes = round(min(LARGEST, max(SMALLEST, total / 16)))
    length = Length(nbytes, max(1, round(total / nbytes)))
    alone = length.nbytes * length.messages / rate
    takes_part = transport.rank in pair
    barrier(transport)
    before = _compute(transport, LONGER * alone) if takes_part else 1.0
    barrier(transport)
    own = None
    if takes_part:
        own = _send_and_compute(transport, pair, length, alone, before)
    told = [each for each in gather(transport, own) if each is not None]
    if not told:
        return None
    return Overlap(min(moved for moved, _ in told), max(slower for _, slower in told))


def _send_and_compute(
    transport: Transport, pair: Flow, length: Length, alone: float, before: float
) -> tuple[float, float]:
    source, dest = pair
    buffers = [torch.zeros(length.nbytes, dtype=torch.uint8) for _ in range(length.messages)]
    if transport.rank == source:
        requests = [transport.isend(buffer, dest, Tag.PROBE) for buffer in buffers]
    else:
        requests = [transport.irecv(buffer, source, Tag.PROBE) for buffer in buffers]
    beside = _compute(transport, LONGER * alone)
    end = transport.now()
    transport.wait_all(requests)
    waited = transport.now() - end
    return max(0.0, 1.0 - waited / alone), max(0.0, 1.0 - beside / before)


def _compute(transport: Transport, seconds: float) -> float:
    """Compute for so long, without a look at messages; products of matrices per second."""
    if transport.models_time:
        transport.sleep(seconds)
        return 1.0
    matrix = torch.eye(SIDE)
    start, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < seconds:
        matrix = matrix @ matrix
        count += 1
    return count / passed
