"""Sums by torch.distributed: NCCL between GPUs, gloo otherwise."""

from __future__ import annotations

import inspect
import os
import socket
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.allreduce.base import AllReduce, Buffers, PendingSum, timeout_of, wait_until
from aladdin_mpi.control.exchange import broadcast, gather
from aladdin_mpi.errors import UserError
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.collectives import allreduce_bytes

MARGIN = 30.0
"""Seconds by which torch's timeout exceeds the transport's, whose error is more specific."""
FOR_EVER = timedelta(days=365)
MEETING = timedelta(seconds=60)
"""Longest time for ranks to connect to rank 0."""
ELSEWHERE = "all-reduce torch: not started, because another rank cannot reach rank 0"
REMEDY = (
    "set MASTER_ADDR to an address of rank 0's host that all hosts reach, and GLOO_SOCKET_IFNAME "
    "to the network interface"
)


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
        backend = _backend(device)
        self._backend_name = backend
        on_device = backend == "nccl"
        limit = timeout_of(transport)
        # NCCL creates its communicator for this device at once if torch accepts a device (2.3).
        accepted = inspect.signature(torch.distributed.init_process_group).parameters
        binds = on_device and "device_id" in accepted
        binding: dict[str, Any] = {"device_id": device} if binds else {}
        torch.distributed.init_process_group(
            backend,
            store=_meet(transport),
            rank=transport.rank,
            world_size=transport.size,
            timeout=FOR_EVER if limit is None else timedelta(seconds=limit + MARGIN),
            **binding,
        )
        self._waits_on_device = on_device
        """Whether the GPU's stream waits for a sum, instead of the host."""
        self._buffers = Buffers(wire_dtype, device, moves_bytes=True, on_device=on_device)

    def start(self, values: Tensor, key: int) -> PendingSum:
        """Start torch's asynchronous all-reduce."""
        buffer, _ = self._buffers.load(values, key)
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


def _meet(transport: Transport) -> Any:
    """Return a store at rank 0 on a free port, whose address is broadcast over the transport.

    Raises:
        UserError: a rank cannot reach the store; raised on all ranks, so that none waits for
            another.
    """
    store, endpoint, problem = None, "", ""
    if transport.rank == 0:
        try:
            address = _own_address(transport)
            store = _store(address, 0, transport, wait_for_workers=False)
            endpoint = f"{address} {store.port}"
        except (UserError, RuntimeError) as error:
            problem = str(error)
    endpoint = broadcast(transport, endpoint)
    if endpoint and store is None:
        address, port = endpoint.split()
        try:
            store = _store(address, int(port), transport)
        except RuntimeError as error:
            problem = (
                f"all-reduce torch: rank {transport.rank} cannot reach rank 0 at {address}, port "
                f"{port} ({error}); {REMEDY}"
            )
    if broadcast(transport, any(gather(transport, store is None))):
        raise UserError(problem or ELSEWHERE)
    return store


def _store(address: str, port: int, transport: Transport, wait_for_workers: bool = True) -> Any:
    return torch.distributed.TCPStore(  # type: ignore[attr-defined]  # a compiled one, without type hints
        address,
        port,
        transport.size,
        is_master=transport.rank == 0,
        timeout=MEETING,
        wait_for_workers=wait_for_workers,
    )


def _own_address(transport: Transport) -> str:
    if len(set(transport.hosts)) == 1:
        return "127.0.0.1"
    address = os.environ.get("MASTER_ADDR") or socket.getfqdn()
    try:
        socket.getaddrinfo(address, None)
    except OSError as error:  # torch would retry for minutes, without a useful message
        raise UserError(
            f"all-reduce torch: the name of rank 0's host, {address}, has no address ({error}); "
            f"{REMEDY}"
        ) from error
    return address
