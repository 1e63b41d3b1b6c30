"""What a server has, a second time at another rank, as of not many updates ago.

When a server is lost, what workers have of the model stands for its buckets. Its momentum is
nobody's else, nor is the centre of elastic averaging: so these are mirrored, a bucket whenever it
has been updated so many times.
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
    """The rank that keeps a server's mirror: the next server, or the first worker."""
    return (server + 1) % servers if servers > 1 else servers


class ServerReplica:
    """A server's side.

    Args:
        every: updates of a bucket between two copies of it.
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
        transport.exclude_from_traffic(Tag.MIRROR)
        role.server.on_update(self.note)

    def note(self, bucket: Bucket) -> None:
        """A bucket has been updated."""
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
        told = {
            "bucket": bucket.index,
            "values": values.clone(),
            "optimizer": None if optimizer is None else optimizer.state_of(bucket.part),
        }
        sends = send_object(self._transport, told, self._keeper, Tag.MIRROR)
        self._sends[bucket.index] = sends


class StoredReplicas:
    """The other side: what this rank keeps of servers, by their numbers and buckets."""

    def __init__(self, transport: Transport, servers: int) -> None:
        self._transport = transport
        self.of: dict[int, dict[int, Mapping[str, Any]]] = {}
        """Of each server, what came last of each of its buckets."""
        transport.exclude_from_traffic(Tag.MIRROR)
        for server in range(servers):
            if keeper_of(server, servers) == transport.rank:
                self.of[server] = {}
                self._await_length(server)

    def _await_length(self, server: int) -> None:
        length = torch.zeros(1, dtype=torch.int64)
        request = self._transport.irecv(length, server, Tag.MIRROR)
        self._transport.when_done(request, partial(self._await_data, server, request, length))

    def _await_data(self, server: int, announced: Request, length: Tensor) -> None:
        if announced.failed is not None or not announced.nbytes:
            return
        data = torch.empty(int(length), dtype=torch.uint8)
        request = self._transport.irecv(data, server, Tag.MIRROR)
        self._transport.when_done(request, partial(self._take, server, request, data))

    def _take(self, server: int, arrived: Request, data: Tensor) -> None:
        if arrived.failed is not None or not arrived.nbytes:
            return
        told = unpacked(data)
        self.of[server][told["bucket"]] = told
        self._await_length(server)
