"""Use torch's RPC as a parameter server: workers call it with buckets, and it adds them up.

As in torch's example of a parameter server (torch.distributed.rpc), but without the model, to
measure only how fast gradients are received.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections import deque
from pathlib import Path

from mpi4py import MPI

# isort: split
import torch
from torch import Tensor
from torch.distributed import rpc

from aladdin_mpi.flat.layout import Layout

SERVER = "rank-0"


class Sums:
    """The server's state: a sum for every bucket, and the number of buckets still expected."""

    def __init__(self, layout: Layout) -> None:
        self._sums = [torch.zeros(bucket.numel) for bucket in layout.buckets]
        self._locks = [threading.Lock() for _ in layout.buckets]
        self._counting = threading.Lock()
        self._awaited = 0
        self._complete = threading.Event()

    def expect(self, buckets: int) -> None:
        """Set the number of expected buckets."""
        self._complete.clear()
        self._awaited = buckets

    def add(self, index: int, values: Tensor) -> None:
        """Add a bucket; called by RPC's threads."""
        with self._locks[index]:  # buckets of two workers may arrive at the same time
            self._sums[index].add_(values)
        with self._counting:
            self._awaited -= 1
            if self._awaited == 0:
                self._complete.set()

    def wait(self, timeout: float) -> None:
        """Wait until all buckets have arrived.

        Raises:
            TimeoutError: they have not arrived in time.
        """
        if not self._complete.wait(timeout):
            raise TimeoutError(f"{self._awaited} buckets have not arrived within {timeout:g} s")


_sums: Sums | None = None


def take(index: int, values: Tensor) -> None:
    """Add a bucket on the server; called by workers."""
    assert _sums is not None
    _sums.add(index, values)


class RpcIntake:
    """One rank of the measurement: rank 0 serves, the others send from a ring of gradients."""

    def __init__(self, layout: Layout, ring: int, timeout: float) -> None:
        global _sums
        world = MPI.COMM_WORLD
        self._layout = layout
        self._timeout = timeout
        self._workers = world.size - 1
        # A separate tensor for each bucket: RPC would copy a part of a larger one before sending.
        self._slots = [[torch.ones(b.numel) for b in layout.buckets] for _ in range(ring)]
        _sums = Sums(layout) if world.rank == 0 else None
        folder = tempfile.mkdtemp(prefix="rpc-") if world.rank == 0 else None
        self._folder = Path(world.bcast(folder))
        # All ranks are on this host, whose name may not be resolvable.
        os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"file://{self._folder / 'store'}", rpc_timeout=timeout
        )
        rpc.init_rpc(
            f"rank-{world.rank}",
            rank=world.rank,
            world_size=world.size,
            rpc_backend_options=options,
        )

    def prepare(self, gradients: int) -> None:
        """Prepare a measurement, before the ranks start together."""
        if _sums is not None:
            _sums.expect(gradients * self._workers * len(self._layout.buckets))

    def run(self, gradients: int) -> None:
        """Run until all gradients are in the sums, or have left this worker."""
        if _sums is not None:
            _sums.wait(self._timeout)
            return
        under_way: deque[list[torch.futures.Future[None]]] = deque()
        for turn in range(gradients):
            if len(under_way) == len(self._slots):
                torch.futures.wait_all(under_way.popleft())
            slot = self._slots[turn % len(self._slots)]
            under_way.append(
                [
                    rpc.rpc_async(SERVER, take, args=(bucket.index, values))
                    for bucket, values in zip(self._layout.buckets, slot, strict=True)
                ]
            )
        for futures in under_way:
            torch.futures.wait_all(futures)

    def close(self) -> None:
        """Shut RPC down on every rank."""
        rpc.shutdown()
        MPI.COMM_WORLD.Barrier()  # the other ranks read the store until their shutdown is complete
        if _sums is not None:
            for path in self._folder.iterdir():
                path.unlink(missing_ok=True)
            self._folder.rmdir()
