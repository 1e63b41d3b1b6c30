"""Which device a rank computes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from aladdin_mpi import accelerator
from aladdin_mpi.errors import UserError


class Place(Protocol):
    """What has to be known of the ranks: see :class:`.Transport`."""

    rank: int
    hosts: Sequence[int]
    shares_process: bool

    @property
    def host(self) -> int:
        """The number of this rank's host."""


def choose_device(wanted: str, transport: Place, servers: int) -> torch.device:
    """A GPU by the worker's place among the workers of its host; servers take none.

    A task that was given one GPU of its own sees no other, and takes that one. With more workers
    than GPUs they share, of which :mod:`aladdin_mpi.run.placement` warns.

    In virtual time all ranks share one process and its first GPU.

    Args:
        transport: knows this rank's host.
        wanted: ``auto``, ``cpu``, ``gpu``, or a kind of GPU as torch calls it.
        servers: number of server ranks, the first ones.

    Raises:
        UserError: a GPU is wanted and this worker's host has none of that kind.
    """
    if transport.rank < servers or wanted == "cpu":
        return torch.device("cpu")
    kind, gpus = accelerator.kind(), accelerator.count()
    if wanted not in ("auto", "gpu", kind):
        found = "none here" if kind is None else f"one called {kind}"
        raise _missing(wanted, found)
    if kind is None:
        if wanted == "gpu":
            raise _missing(wanted, "none here")
        return torch.device("cpu")
    place = list(transport.hosts[servers : transport.rank]).count(transport.host)
    device = torch.device(kind, 0 if transport.shares_process else place % gpus)
    accelerator.enter(device)
    return device


def _missing(wanted: str, found: str) -> UserError:
    return UserError(
        f"--device {wanted}: expected a GPU on every host with workers, found {found}; use "
        "--device cpu, or check CUDA_VISIBLE_DEVICES and the driver"
    )
