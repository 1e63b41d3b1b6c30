"""Selection of the library that sums gradients."""

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
from aladdin_mpi.options.algorithms import FAULT_TOLERANT_ALLREDUCES
from aladdin_mpi.transport.base import Transport

SHORT = 512 * 1024
"""Largest message, in bytes, for which MPI's own all-reduce is used between hosts.
It takes fewer messages than a ring: measured with `benchmarks.allreduce --hosts 4 --ranks 4 8
--megabytes 0.1 1`, 100 KB took 1.9 ms instead of 3.1 with a rank on each of four hosts, 7 ms
instead of 40 with two; 1 MB took as long, or longer."""


class BySize(AllReduce):
    """All-reduce that uses ``short`` for sums of up to ``most`` bytes, otherwise ``long``."""

    def __init__(self, short: AllReduce, long: AllReduce, most: int = SHORT) -> None:
        self._short = short
        self._long = long
        self._most = most
        self.name = long.name

    def start(self, values: Tensor, key: int) -> PendingSum:
        """Start the sum with the all-reduce for its size."""
        all_reduce = self._short if values.nbytes <= self._most else self._long
        return all_reduce.start(values, key)

    def describe(self) -> str:
        """Return the descriptions of both all-reduces."""
        return f"{self._long.describe()}; up to {self._most >> 10} KB {self._short.describe()}"

    def abandon(self, failed_rank: int) -> None:
        """End waits of both all-reduces."""
        self._short.abandon(failed_rank)
        self._long.abandon(failed_rank)

    def close(self) -> None:
        """Close both all-reduces."""
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

    ``auto`` is NCCL if every rank has its own GPU, otherwise the choice of :func:`by_transport`;
    ``benchmarks/allreduce.py`` measures which is faster on a given machine. A simulation supports
    ``ring`` and ``mpi``, which both use a ring of the simulated network.

    Args:
        name: one of ``NAMES``.
        transport: transport whose ranks take part.
        device: device of the gradients; "meta" with simulated computation.
        wire_dtype: torch.float32, torch.float64 or torch.bfloat16.

    Raises:
        UserError: an unknown name, or the library cannot be used on some rank.
    """
    if name not in NAMES:
        raise UserError(f"all-reduce: expected one of {', '.join(NAMES)}, got {name!r}")
    if name == "auto":
        name = _best(transport, device)
    elif transport.models_time and name not in FAULT_TOLERANT_ALLREDUCES:
        raise UserError(
            f"all-reduce: expected auto, ring or mpi in a simulation, got {name}; use one of "
            "these, or start real ranks with mpirun"
        )
    elif name == "horovod" and not transport.has_collectives:
        raise UserError(
            "all-reduce: horovod cannot be combined with --island or --node-sums, because it "
            "requires all ranks. Use ring or torch, or leave the option out."
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
    """Return an all-reduce that needs no other library.

    ``name`` is one of ``FAULT_TOLERANT_ALLREDUCES``. ``auto`` is the ring between hosts, except for
    short messages; on one host, where MPI uses shared memory, and in simulations it is the engine's
    own all-reduce. bf16, which a ring would round at each rank, is sent directly between all
    ranks. The other arguments are those of :func:`make`.
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
    gpus = gather(transport, mine)
    return str(broadcast(transport, "torch" if _are_apart(gpus) else "auto"))


def _are_apart(gpus: Sequence[list[str] | None]) -> bool:
    """Return whether every rank has its own GPU.

    Compares GPU identities, not numbers: each task may see only its own GPU, as number 0.
    """
    return None not in gpus and len({tuple(gpu or ()) for gpu in gpus}) == len(gpus)


def _check(name: str, transport: Transport, obstacle: str | None) -> None:
    """Raise UserError on every rank if any rank has an obstacle."""
    hindered = int(broadcast(transport, gather(transport, obstacle is not None).count(True)))
    if obstacle is not None:
        raise UserError(f"all-reduce {name}: {obstacle}")
    if hindered:
        raise UserError(
            f"all-reduce {name}: {hindered} of {transport.size} ranks cannot use it; install it "
            "on every host, or use the backend ring"
        )
