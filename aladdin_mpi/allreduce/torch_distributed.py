"""Sums by torch.distributed: NCCL between GPUs, gloo otherwise."""

from __future__ import annotations

import inspect
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.allreduce.base import AllReduce, Buffers, PendingSum, timeout_of, wait_until
from aladdin_mpi.control.exchange import broadcast, gather
from aladdin_mpi.errors import UserError
from aladdin_mpi.transport.base import Transport, await_event
from aladdin_mpi.transport.collectives import allreduce_bytes

MARGIN = 30.0
"""Seconds by which torch's timeout exceeds the transport's, whose error is more specific."""
FOR_EVER = timedelta(days=365)
MEETING = timedelta(seconds=60)
"""Longest time for ranks to connect to rank 0."""


def obstacle(device: torch.device) -> str | None:
    """Return the reason and the remedy if torch.distributed cannot be used here; None if it can."""
    if not torch.distributed.is_available():
        return "this torch is built without torch.distributed; use the backend mpi"
    backend = _backend(device)
    if not (
        torch.distributed.is_nccl_available()
        if backend == "nccl"
        else torch.distributed.is_gloo_available()
    ):
        return f"this torch is built without {backend}; use the backend mpi"
    if torch.distributed.is_initialized():
        return (
            "this program already has a torch.distributed process group; end it first "
            "(destroy_process_group), or use the backend mpi"
        )
    return None


_ended: list[Any] = []


def end_group() -> None:
    """End torch's process group, and keep a reference to it until the next one is ended.

    One of gloo's threads may still hold a reference for a moment. If it were the last, the
    group would be destroyed in a thread that it has to join: "Resource deadlock avoided".
    """
    if not torch.distributed.is_initialized():
        return  # the program has ended it
    group = torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()
    _ended[:] = [group]


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"  # ROCm's RCCL has the same name


class TorchAllReduce(AllReduce):
    """All-reduce in the wire's dtype by torch.distributed; bf16 is rounded at every addition.

    Rank 0's address is ``MASTER_ADDR`` if set, otherwise the name of its host.

    Raises:
        UserError: a rank could not reach rank 0, or rank 0's host has no address.
    """

    name = "torch"

    def __init__(self, transport: Transport, device: torch.device, wire_dtype: torch.dtype) -> None:
        self._transport = transport
        self._backend_name = _backend(device)
        on_device = self._backend_name == "nccl"

        def everyones(fact: Any) -> list[Any]:
            facts: list[Any] = broadcast(transport, gather(transport, fact))
            return facts

        ranks = range(transport.size)
        meeting = Meeting(transport.rank, ranks, transport.hosts, everyones, "all-reduce torch")
        meeting.join(device, timeout_of(transport))
        self._waits_on_device = on_device
        """Whether the GPU's stream waits for a sum, instead of the host."""
        self._buffers = Buffers(wire_dtype, device, moves_bytes=True, on_device=on_device)

    def start(self, values: Tensor, key: int) -> PendingSum:
        """Start torch's asynchronous all-reduce."""
        buffer, filled = self._buffers.load(values, key)
        if filled is not None:
            await_event(self._transport, filled)
        self._transport.traffic.bytes_sent += allreduce_bytes(buffer.nbytes, self._transport.size)
        work = torch.distributed.all_reduce(buffer, async_op=True)
        assert work is not None

        def wait() -> Tensor:
            if not self._waits_on_device:
                what = f"torch.distributed's sum of bucket {key}"
                wait_until(work.is_completed, self._transport, what)
            work.wait()
            Buffers.store(buffer, values)
            return values

        return PendingSum(wait)

    def describe(self) -> str:
        """Return torch's backend and the dtype."""
        name = self._buffers.name
        return f"torch.distributed over {self._backend_name}: all-reduce in {name}"

    def close(self) -> None:
        """End torch's process group."""
        end_group()


@dataclass(frozen=True)
class Meeting:
    """The ranks that form a process group of torch.distributed.

    Attributes:
        rank: this rank.
        members: the ranks of the group, including this one.
        hosts: for every rank of the job the number of its host.
        everyones: returns the facts of all ranks of the job, which call it together.
        purpose: begins error messages.
    """

    rank: int
    members: Sequence[int]
    hosts: Sequence[int]
    everyones: Callable[[Any], list[Any]]
    purpose: str

    def join(self, device: torch.device, limit: float | None) -> None:
        """Make the group torch's default one; every rank of the job calls it.

        Args:
            device: of this rank's tensors.
            limit: longest wait for another rank in seconds; None: no limit.

        Raises:
            UserError: a rank cannot reach the first one of its group; raised on all ranks.
        """
        # NCCL creates its communicator for this device at once if torch accepts a device (2.3).
        backend = _backend(device)
        accepted = inspect.signature(torch.distributed.init_process_group).parameters
        binds = backend == "nccl" and "device_id" in accepted
        binding: dict[str, Any] = {"device_id": device} if binds else {}
        # Torch replaces it by one that holds back what is written until the present one returns,
        # which ends the job.
        report_errors = sys.excepthook
        torch.distributed.init_process_group(
            backend,
            store=self._store(),
            rank=self.members.index(self.rank),
            world_size=len(self.members),
            timeout=FOR_EVER if limit is None else timedelta(seconds=limit + MARGIN),
            **binding,
        )
        sys.excepthook = report_errors

    def _store(self) -> Any:
        """Return a store at the first member on a free port, whose address it sends to all."""
        first, store, endpoint, problem = self.members[0], None, "", ""
        if self.rank == first:
            try:
                address = self._own_address()
                store = self._connect(address, 0, wait_for_workers=False)
                endpoint = f"{address} {store.port}"
            except (UserError, RuntimeError) as error:
                problem = str(error)
        endpoint = self.everyones(endpoint)[first]
        if endpoint and store is None:
            address, port = endpoint.split()
            try:
                store = self._connect(address, int(port))
            except RuntimeError as error:
                problem = (
                    f"{self.purpose}: rank {self.rank} cannot reach rank {first} at {address}, "
                    f"port {port} ({error}); {self._remedy}"
                )
        if any(self.everyones(store is None)):
            elsewhere = "not started, because another rank cannot reach the first of its group"
            raise UserError(problem or f"{self.purpose}: {elsewhere}")
        return store

    @property
    def _remedy(self) -> str:
        if self.members[0]:  # MASTER_ADDR is an address of rank 0's host
            return "give that host a name that all hosts know, and set GLOO_SOCKET_IFNAME"
        return (
            "set MASTER_ADDR to an address of rank 0's host that all hosts reach, and "
            "GLOO_SOCKET_IFNAME to the network interface"
        )

    def _connect(self, address: str, port: int, wait_for_workers: bool = True) -> Any:
        return torch.distributed.TCPStore(  # type: ignore[attr-defined]  # a compiled one, without type hints
            address,
            port,
            len(self.members),
            is_master=self.rank == self.members[0],
            timeout=MEETING,
            wait_for_workers=wait_for_workers,
        )

    def _own_address(self) -> str:
        if len({self.hosts[rank] for rank in self.members}) == 1:
            return "127.0.0.1"
        given = os.environ.get("MASTER_ADDR") if self.members[0] == 0 else None
        address = given or socket.getfqdn()
        try:
            socket.getaddrinfo(address, None)
        except OSError as error:  # torch would retry for minutes, without a useful message
            raise UserError(
                f"{self.purpose}: the name of rank {self.members[0]}'s host, {address}, has no "
                f"address ({error}); {self._remedy}"
            ) from error
        return address
