"""Which library sums the gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aladdin_mpi import accelerator
from aladdin_mpi.allreduce import horovod, torch_distributed
from aladdin_mpi.allreduce.base import AllReduce, PendingSum
from aladdin_mpi.allreduce.horovod import HorovodAllReduce
from aladdin_mpi.allreduce.messages import DirectAllReduce, RingAllReduce, SingleAllReduce
from aladdin_mpi.allreduce.torch_distributed import TorchAllReduce
from aladdin_mpi.control.exchange import broadcast, gather
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import OUTLAST_DEATHS
from aladdin_mpi.transport.base import Transport

SHORT = 512 * 1024
"""Bytes up to which MPI's own all-reduce is used between hosts. It takes fewer messages than a ring
(`benchmarks.allreduce --hosts 4 --ranks 4 8 --megabytes 0.1 1`): 100 KB took 1.9 ms and not 3.1
with a rank on each of four hosts, 7 ms and not 40 with two; 1 MB took as long, or longer."""


class BySize(AllReduce):
    """Sums of up to ``most`` bytes go through ``short``, others through ``long``."""

    def __init__(self, short: AllReduce, long: AllReduce, most: int = SHORT) -> None:
        self._short = short
        self._long = long
        self._most = most
        self.name = long.name

    def start(self, values: Tensor, key: int) -> PendingSum:
        """See :meth:`AllReduce.start`."""
        of = self._short if values.nbytes <= self._most else self._long
        return of.start(values, key)

    def describe(self) -> str:
        """See :meth:`AllReduce.describe`."""
        return f"{self._long.describe()}; up to {self._most >> 10} KB {self._short.describe()}"

    def abandon(self, dead: int) -> None:
        """See :meth:`AllReduce.abandon`."""
        self._short.abandon(dead)
        self._long.abandon(dead)

    def close(self) -> None:
        """See :meth:`AllReduce.close`."""
        self._short.close()
        self._long.close()


NAMES = ("auto", "ring", "mpi", "horovod", "torch")


def make(
    name: str,
    transport: Transport,
    device: torch.device,
    wire_dtype: torch.dtype = torch.float32,
) -> AllReduce:
    """Return the all-reduce called ``name``; every rank calls this with the same arguments.

    ``auto`` is NCCL if every rank has a GPU to itself, else :func:`by_transport`'s choice;
    ``benchmarks/allreduce.py`` measures which is faster on a given machine. In virtual time there
    are ``ring`` and ``mpi``, which both go around a ring of the modelled network.

    Args:
        name: one of ``NAMES``.
        transport: among whose ranks is summed.
        device: where the gradients live; "meta" with timed computing.
        wire_dtype: torch.float32, torch.float64 or torch.bfloat16.

    Raises:
        UserError: an unknown name, or what it stands for cannot be used on some rank.
    """
    if name not in NAMES:
        raise UserError(f"all-reduce: expected one of {', '.join(NAMES)}, got {name!r}")
    if name == "auto":
        name = _best(transport, device)
    elif transport.models_time and name not in OUTLAST_DEATHS:
        raise UserError(
            f"all-reduce: expected auto, ring or mpi in a simulation, got {name}; use one of "
            "these, or start real ranks with mpirun"
        )
    elif name == "horovod" and not transport.has_collectives:
        raise UserError(
            "all-reduce: horovod cannot be combined with --node-sums, because it requires all "
            "ranks. Use ring or torch, or leave --node-sums out."
        )
    if name == "horovod":
        _check(name, transport, horovod.obstacle(device, wire_dtype))
        return HorovodAllReduce(transport, device, wire_dtype)
    if name == "torch":
        _check(name, transport, torch_distributed.obstacle(device))
        return TorchAllReduce(transport, device, wire_dtype)
    return by_transport(name, transport, device, wire_dtype)


def by_transport(
    name: str, transport: Transport, device: torch.device, wire_dtype: torch.dtype
) -> AllReduce:
    """Return the all-reduce that needs no other library; ``name`` is one of ``OUTLAST_DEATHS``.

    ``auto`` is the ring between hosts, but for what is short, and the engine's own all-reduce on
    one host, where MPI's goes through shared memory, and in virtual time, where it is a ring too.
    bf16, which would be rounded at each rank of a ring, goes from rank to rank at once. The other
    arguments are those of :func:`make`.
    """
    if wire_dtype == torch.bfloat16:
        return DirectAllReduce(transport, device, wire_dtype)
    ring = RingAllReduce(transport, device, wire_dtype)
    if name == "ring" or not transport.has_collectives:
        return ring
    own = SingleAllReduce(transport, device, wire_dtype)
    if name == "mpi" or transport.models_time or len(set(transport.hosts)) == 1:
        return own
    return BySize(own, ring)


def _best(transport: Transport, device: torch.device) -> str:
    if transport.models_time:
        return "auto"
    nccl = device.type == "cuda" and torch_distributed.obstacle(device) is None
    mine = [transport.host, accelerator.identity(device)] if nccl else None
    everyone = gather(transport, mine)
    return str(broadcast(transport, "torch" if _are_apart(everyone) else "auto"))


def _are_apart(gpus: Sequence[list[str] | None]) -> bool:
    """Return whether every rank has a GPU of its own, by the GPUs' identities.

    Not by their numbers: each task may see its own alone, as number 0.
    """
    return None not in gpus and len({tuple(gpu or ()) for gpu in gpus}) == len(gpus)


def _check(name: str, transport: Transport, obstacle: str | None) -> None:
    """Raise UserError on every rank if there is an obstacle on any."""
    hindered = int(broadcast(transport, sum(gather(transport, obstacle is not None))))
    if obstacle is not None:
        raise UserError(f"all-reduce {name}: {obstacle}")
    if hindered:
        raise UserError(
            f"all-reduce {name}: {hindered} of {transport.size} ranks cannot use it; install it "
            "on every host, or use the backend ring"
        )
