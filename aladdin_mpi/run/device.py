"""Which device a rank computes on."""

from __future__ import annotations

import torch

from aladdin_mpi.errors import UserError
from aladdin_mpi.transport.base import Transport


def choose_device(wanted: str, transport: Transport, servers: int) -> torch.device:
    """A GPU by the worker's place among the workers of its host; servers take none.

    A task that was given one GPU of its own sees no other, and takes that one. With more workers
    than GPUs they share, of which :mod:`aladdin_mpi.run.placement` warns.

    In virtual time all ranks share one process and, with ``cuda``, its first GPU.

    Args:
        transport: knows this rank's host.
        wanted: ``auto``, ``cpu`` or ``cuda``.
        servers: number of server ranks, the first ones.

    Raises:
        UserError: ``cuda`` is wanted and this worker's host has none.
    """
    if transport.rank < servers or wanted == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus == 0:
        if wanted == "cuda":
            raise UserError(
                "--device cuda: expected a GPU on every host with workers, found none here; use "
                "--device cpu, or check CUDA_VISIBLE_DEVICES and the driver"
            )
        return torch.device("cpu")
    if transport.shares_process:
        return torch.device("cuda", 0)
    place = list(transport.hosts[servers : transport.rank]).count(transport.host)
    return torch.device("cuda", place % gpus)
