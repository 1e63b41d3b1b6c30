"""Sums over the workers, asked for by their training loops."""

from __future__ import annotations

import torch
from torch import Tensor

from aladdin_mpi.control.tags import Tag
from aladdin_mpi.errors import LostError, PeerFailedError
from aladdin_mpi.roles.worker import Worker


def allreduce(worker: Worker, value: float | Tensor) -> tuple[Tensor, int]:
    """The sum of ``value`` over all workers that live, in fp64, and how many they are.

    Each sends its own to all others, and adds them up in the order of the workers: all have the
    same sum, to the bit. A collective of MPI would need the servers too.

    Raises:
        LostError: the group of ranks comes apart. Those who wait here cannot go on in the next one,
            whose other workers may have to make steps with them before they come here.
    """
    transport = worker.whole
    mine = torch.as_tensor(value, dtype=torch.float64).detach().cpu().reshape(-1).contiguous()
    others = [
        rank for rank in transport.living if rank >= worker.servers and rank != transport.rank
    ]
    received = {rank: torch.empty_like(mine) for rank in others}
    receives = {
        rank: transport.irecv(buffer, rank, Tag.AMONG_WORKERS) for rank, buffer in received.items()
    }
    sends = [transport.isend(mine, rank, Tag.AMONG_WORKERS) for rank in others]
    values = {transport.rank: mine}
    for rank, request in receives.items():
        try:
            transport.wait(request)
        except PeerFailedError:
            continue
        values[rank] = received[rank]
    if transport.has_come_apart:
        raise LostError("a rank was lost while workers waited for each other in run.reduce()")
    transport.wait_ended(sends)
    total = torch.stack([values[rank] for rank in sorted(values)]).sum(0)
    shape = value.shape if isinstance(value, Tensor) else ()
    return total.reshape(shape), len(values)
