"""Sums by Horovod (Sergeev and Del Balso, arXiv:1802.05799), over MPI or NCCL."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.allreduce.base import AllReduce, Buffers, PendingSum, wait_until
from aladdin_mpi.errors import UserError
from aladdin_mpi.transport.base import Transport, await_event
from aladdin_mpi.transport.collectives import allreduce_bytes

BUILD = "run `make horovod` (tools/build-horovod.sh)"

_users = 0
"""Number of open objects of this process, which share one start and end of Horovod."""


def obstacle(device: torch.device, wire_dtype: torch.dtype) -> str | None:
    """Return the reason and the remedy if Horovod cannot be used here; None if it can.

    Does not start Horovod, nor load it if that would load a second MPI.
    """
    if wire_dtype == torch.bfloat16:
        return f"Horovod 0.28 cannot sum {wire_dtype}; use --wire fp32, or the backend mpi"
    compiled = library()
    if compiled is None:
        return f"Horovod is not installed; {BUILD}, or use the backend mpi"
    needed = _mpi_of(compiled)
    if needed is None:
        return f"this Horovod is built without MPI; {BUILD}"
    maps = Path("/proc/self/maps").read_text().splitlines()
    loaded = {Path(line.split()[-1]).name for line in maps if "/libmpi" in line}
    if not any(name == needed or name.startswith(needed + ".") for name in loaded):
        return (
            f"this Horovod is built for another MPI ({needed}) than this run's; start the run with "
            f"that one, or build it again for this one: {BUILD}"
        )
    if device.type == "cuda" and not _horovod().nccl_built():
        return (
            f"this Horovod cannot sum on a GPU; HOROVOD_GPU_OPERATIONS=NCCL, then {BUILD}, or use "
            "the backend mpi or torch"
        )
    return None


def library() -> Path | None:
    """Return the path of Horovod's compiled part for torch, without loading it; None: missing."""
    package = find_spec("horovod")
    folders = package.submodule_search_locations if package else None
    files = [p for folder in folders or () for p in Path(folder).glob("torch/mpi_lib_v2*.so")]
    return files[0] if files else None


def _mpi_of(compiled: Path) -> str | None:
    """Return the MPI library that a compiled file requires, such as ``libmpi.so.40``."""
    match = re.search(rb"\0(libmpi\w*\.so\.\d+)\0", compiled.read_bytes())
    return match[1].decode() if match else None


def _horovod() -> Any:
    import horovod.torch

    return horovod.torch


class HorovodAllReduce(AllReduce):
    """All-reduce in ``dtype`` by ``horovod.torch``, which has its own communication thread.

    Raises:
        UserError: Horovod's rank or size differs from the transport's.
    """

    name = "horovod"

    def __init__(self, transport: Transport, device: torch.device, dtype: torch.dtype) -> None:
        global _users
        self._transport = transport
        self._hvd = _horovod()
        self._hvd.init()
        _users += 1
        found = (self._hvd.rank(), self._hvd.size())
        if found != (transport.rank, transport.size):
            raise UserError(
                f"all-reduce horovod: expected rank {transport.rank} of {transport.size}, got "
                f"{found[0]} of {found[1]} from Horovod; start all ranks with one mpirun, not "
                "horovodrun"
            )
        on_device = device.type == "cuda"
        self._buffers = Buffers(dtype, device, moves_bytes=True, on_device=on_device)

    def start(self, values: Tensor, key: int) -> PendingSum:
        """Start the sum in Horovod's thread."""
        buffer, filled = self._buffers.load(values, key)
        if filled is not None:
            await_event(self._transport, filled)
        self._transport.traffic.bytes_sent += allreduce_bytes(buffer.nbytes, self._transport.size)
        handle = self._hvd.allreduce_async_(buffer, op=self._hvd.Sum, name=f"bucket {key}")

        def wait() -> Tensor:
            what = f"Horovod's sum of bucket {key}"
            wait_until(lambda: self._hvd.poll(handle), self._transport, what)
            self._hvd.synchronize(handle)
            Buffers.store(buffer, values)
            return values

        return PendingSum(wait)

    def describe(self) -> str:
        """Return Horovod's version and its communication library."""
        import horovod

        over = "NCCL" if self._hvd.nccl_built() else "MPI"
        return f"Horovod {horovod.__version__} over {over}: all-reduce in {self._buffers.name}"

    def close(self) -> None:
        """Shut Horovod down with the last open object of this process."""
        global _users
        _users -= 1
        if _users == 0:
            self._hvd.shutdown()  # otherwise its thread would call MPI after MPI has ended
