"""A transport that forwards to another, the base of those that change a part of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from aladdin_mpi.transport.base import Event, Handler, IdleUntil, Request, T, Transport


def allreduce_bytes(nbytes: int, ranks: int) -> int:
    """2(n-1)/n of the buffer: a reduce-scatter, then an all-gather of the parts."""
    return 2 * nbytes * (ranks - 1) // ranks


def allgather_bytes(nbytes: int, ranks: int) -> int:
    """n-1 times one rank's buffer: everyone's part passes through every rank but one."""
    return nbytes * (ranks - 1)


def alltoall_bytes(nbytes: int, ranks: int) -> int:
    """(n-1)/n of the buffer: all parts but the rank's own."""
    return nbytes * (ranks - 1) // ranks


def broadcast_bytes(nbytes: int, ranks: int) -> int:
    """(n-1)/n of the buffer for each rank: n-1 ranks receive it whole, whoever sends it on."""
    return nbytes * (ranks - 1) // ranks


class TransportWrapper(Transport):
    """A transport that hands everything on to another one, to be changed by subclasses."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.rank, self.size = inner.rank, inner.size
        self.traffic, self.hosts, self.engine = inner.traffic, inner.hosts, inner.engine
        self.models_time, self.needs_memory = inner.models_time, inner.needs_memory
        self.shares_process = inner.shares_process
        self.survives, self.progresses = inner.survives, inner.progresses
        self.meets = inner.meets

    def __getattr__(self, name: str) -> Any:
        """What only one engine has."""
        return getattr(self.inner, name)

    def meet(self, fact: Any) -> list[Any]:
        return self.inner.meet(fact)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        return self.inner.once(key, make)

    def host_name(self, rank: int) -> str:
        return self.inner.host_name(rank)

    def original(self, rank: int) -> int:
        return self.inner.original(rank)

    def now(self) -> float:
        return self.inner.now()

    def sleep(self, seconds: float) -> None:
        self.inner.sleep(seconds)

    def charge_memory(self, nbytes: int) -> None:
        self.inner.charge_memory(nbytes)

    def sleep_until(self, moment: float) -> None:
        self.inner.sleep_until(moment)

    def sleep_between(
        self,
        moments: Sequence[float],
        action: Callable[[int], None],
        idle_until: IdleUntil | None = None,
    ) -> None:
        self.inner.sleep_between(moments, action, idle_until)

    def isend(self, buffer: Tensor, dest: int, tag: int, after: Event | None = None) -> Request:
        return self.inner.isend(buffer, dest, tag, after)

    def irecv(self, buffer: Tensor, source: int, tag: int) -> Request:
        return self.inner.irecv(buffer, source, tag)

    def test(self, request: Request) -> bool:
        return self.inner.test(request)

    def wait_any(self, requests: Sequence[Request], timeout: float | None = None) -> int:
        return self.inner.wait_any(requests, timeout)

    def cancel(self, request: Request) -> None:
        self.inner.cancel(request)

    def abandon(self, request: Request) -> None:
        self.inner.abandon(request)

    def abandon_tags(self, tags: range) -> None:
        self.inner.abandon_tags(tags)

    def exclude_from_traffic(self, *tags: int) -> None:
        self.inner.exclude_from_traffic(*tags)

    def on_message(self, tag: int, nbytes: int, handler: Handler) -> None:
        self.inner.on_message(tag, nbytes, handler)

    def atomic(self) -> AbstractContextManager[None]:
        return self.inner.atomic()

    def ibarrier(self) -> Request:
        return self.inner.ibarrier()

    def ibroadcast(self, buffer: Tensor, root: int) -> Request:
        return self.inner.ibroadcast(buffer, root)

    def iallreduce(self, buffer: Tensor, total: Tensor | None = None) -> Request:
        return self.inner.iallreduce(buffer, total)

    def iallgather(self, buffer: Tensor, gathered: Tensor) -> Request:
        return self.inner.iallgather(buffer, gathered)

    def ialltoall(self, buffer: Tensor, received: Tensor) -> Request:
        return self.inner.ialltoall(buffer, received)

    def when_done(self, request: Request, action: Callable[[], None]) -> None:
        self.inner.when_done(request, action)

    def when_happened(self, event: Event, action: Callable[[], None]) -> None:
        self.inner.when_happened(event, action)

    @property
    def failed(self) -> frozenset[int]:
        return self.inner.failed

    @property
    def excluded(self) -> frozenset[int]:
        return self.inner.excluded

    def exclude(self, rank: int) -> None:
        self.inner.exclude(rank)

    @property
    def is_revoked(self) -> bool:
        return self.inner.is_revoked

    def is_revoked_without(self, rank: int) -> bool:
        return self.inner.is_revoked_without(rank)

    def on_failure(self, action: Callable[[int], None]) -> None:
        self.inner.on_failure(action)

    def watch(self, look: Callable[[], None]) -> None:
        self.inner.watch(look)

    def unwatch(self, look: Callable[[], None]) -> None:
        self.inner.unwatch(look)

    def close(self, status: int = 0) -> None:
        self.inner.close(status)
