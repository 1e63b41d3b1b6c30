"""Replica of a server's state on another rank, a bounded number of updates old.

If a server fails, the workers' models replace its buckets. But no other rank has its momentum or
the centre of elastic averaging: so these are replicated, each bucket after a fixed number of
updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.control.exchange import send_object, unpacked
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.transport.base import Request, Transport


def keeper_of(server: int, servers: int) -> int:
    """Return the rank that keeps a server's replica: the next server, or the first worker."""
    return (server + 1) % servers if servers > 1 else servers


class ServerReplica:
    """Sender of a server's state to its replica.

    Args:
        every: number of updates of a bucket between two copies of it.
    """

    def __init__(
        self, transport: Transport, role: ServerAlgorithm, servers: int, every: int
    ) -> None:
        self._transport = transport
        self._role = role
        self._keeper = keeper_of(transport.rank, servers)
        self._every = every
        self._updates = {bucket.index: 0 for bucket in role.server.buckets}
        self._sends: dict[int, list[Request]] = {}
        transport.exclude_from_traffic(Tag.REPLICA)
        role.server.on_update(self.note)

    def note(self, bucket: Bucket) -> None:
        """Count an update of a bucket."""
        self._updates[bucket.index] += 1
        last = self._sends.get(bucket.index, ())
        is_due = self._updates[bucket.index] >= self._every
        if is_due and all(request.done for request in last):
            self._updates[bucket.index] = 0
            self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        if self._keeper in self._transport.failed:
            return
        values: Tensor = self._role.server.values[bucket.index]
        optimizer = self._role.optimizer
        if values.is_meta:
            return
        state = {
            "bucket": bucket.index,
            "values": values.clone(),
            "optimizer": None if optimizer is None else optimizer.state_of(bucket.part),
        }
        sends = send_object(self._transport, state, self._keeper, Tag.REPLICA)
        self._sends[bucket.index] = sends


class StoredReplicas:
    """Replicas kept on this rank, by server and bucket."""

    def __init__(self, transport: Transport, servers: int) -> None:
        self._transport = transport
        self.of: dict[int, dict[int, Mapping[str, Any]]] = {}
        """The last state of each bucket of each server."""
        transport.exclude_from_traffic(Tag.REPLICA)
        for server in range(servers):
            if keeper_of(server, servers) == transport.rank:
                self.of[server] = {}
                self._await_length(server)

    def _await_length(self, server: int) -> None:
        length = torch.zeros(1, dtype=torch.int64)
        request = self._transport.irecv(length, server, Tag.REPLICA)
        self._transport.when_done(request, partial(self._await_data, server, request, length))

    def _await_data(self, server: int, announced: Request, length: Tensor) -> None:
        if announced.failed is not None or not announced.nbytes:
            return
        data = torch.empty(int(length), dtype=torch.uint8)
        request = self._transport.irecv(data, server, Tag.REPLICA)
        self._transport.when_done(request, partial(self._take, server, request, data))

    def _take(self, server: int, arrived: Request, data: Tensor) -> None:
        if arrived.failed is not None or not arrived.nbytes:
            return
        state = unpacked(data)
        self.of[server][state["bucket"]] = state
        self._await_length(server)
