"""The virtual engine: all ranks in one process, in turn, under one virtual clock.

Every rank runs its own straight-line code in a greenlet. Only ``sleep`` and the waits
switch to another rank; between two of them no virtual time passes, so that a loop
around ``test`` alone never ends. The order of events of equal time is drawn from the
seed: one seed is one interleaving, and it can be replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from aladdin_mpi.errors import PeerFailedError, TransportError, UserError
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.process.heap import collected_seldom
from aladdin_mpi.transport import collectives
from aladdin_mpi.transport.base import (
    ANY_SOURCE,
    Event,
    Handler,
    IdleUntil,
    Request,
    Simulation,
    Transport,
    WaitSet,
    sleep_and_call,
)
from aladdin_mpi.transport.collectives import Channel, Steps
from aladdin_mpi.transport.virtual.callbacks import ScheduledCallbacks
from aladdin_mpi.transport.virtual.endpoint import Endpoint, Fabric, VirtualWaitSet
from aladdin_mpi.transport.virtual.fiber import EARLY, VirtualClock
from aladdin_mpi.transport.virtual.messages import Operation

T = TypeVar("T")


class DeadlockError(TransportError):
    """Every rank waits, and nothing is under way that could end a wait."""


class VirtualCluster:
    """Ranks that run under one virtual clock.

    Args:
        size: number of ranks.
        cluster: hosts, network and failures.
        seed: decides the order of simultaneous events and the random delays.
        start_time: virtual seconds at which the clock starts, for a run that goes
            on from a checkpoint. Ranks whose death lies before it are dead.
        silence: a rank that pauses for longer, in virtual seconds, is excluded from then
            on, and ends; None: never.

    Raises:
        UserError: ``size`` is not positive, or the cluster names a rank beyond it.
    """

    def __init__(
        self,
        size: int,
        cluster: Cluster,
        seed: int = 0,
        start_time: float = 0.0,
        silence: float | None = None,
    ) -> None:
        if size < 1:
            raise UserError(f"size: expected 1 rank or more, got {size}")
        _check_ranks("deaths", list(cluster.deaths), size)
        _check_ranks("pauses", [pause[0] for pause in cluster.pauses], size)
        self.size = size
        self.cluster = cluster
        self.seed = seed
        self.start_time = start_time
        self.silence = silence

    def run(self, main: Callable[[VirtualTransport], T]) -> list[T | None]:
        """Run ``main(transport)`` on every rank; return the results by rank, None for the dead.

        Raises:
            DeadlockError: every rank that is left waits for ever.
            Exception: the first that a rank did not catch; a note names the rank.
        """
        with collected_seldom():
            return _Run(self).run(main)


class _Run:
    """One run: the loop over the events."""

    def __init__(self, setup: VirtualCluster) -> None:
        self.clock = VirtualClock(setup.seed, setup.start_time)
        # Where a run goes on all ranks take part again, as over MPI.
        self.deaths = _from(setup.start_time, setup.cluster.deaths)
        self.silences = _from(setup.start_time, _silences(setup))
        may_fail = bool(setup.cluster.deaths or _silences(setup))
        self.fabric = Fabric(setup.cluster, setup.size, self.clock, may_fail)
        self.live = 0

    def run(self, main: Callable[[VirtualTransport], T]) -> list[T | None]:
        endpoints = self.fabric.endpoints
        grad_mode = torch.is_grad_enabled()
        results: list[T | None] = [None] * len(endpoints)
        for endpoint in endpoints:
            endpoint.fiber.start(self._body(endpoint, main, results))
        for rank, time in sorted(self.deaths.items()):
            self.clock.at(max(time, self.clock.now), self._die, endpoints[rank], EARLY)
        for rank, time in sorted(self.silences.items()):
            self.clock.at(max(time, self.clock.now), self._exclude, endpoints[rank], EARLY)
        self._count_live()
        try:
            if self.live and not self.clock.run():
                raise DeadlockError(self._deadlock())
        finally:
            for endpoint in endpoints:
                endpoint.fiber.kill()
            torch.set_grad_enabled(grad_mode)
        return results

    def _body(
        self, endpoint: Endpoint, main: Callable[[VirtualTransport], T], results: list[T | None]
    ) -> Callable[[], None]:
        def body() -> None:
            try:
                result = main(VirtualTransport(endpoint))
                if not endpoint.fiber.killed:
                    results[endpoint.rank] = result
            finally:
                self._set_live(self.live - 1)

        return body

    def _count_live(self) -> None:
        self._set_live(sum(not endpoint.fiber.ended for endpoint in self.fabric.endpoints))

    def _set_live(self, live: int) -> None:
        self.live = live
        if not live:
            self.clock.stop()

    def _die(self, endpoint: Endpoint) -> None:
        if not endpoint.fiber.ended:
            self.fabric.remove(endpoint.rank)
            self._count_live()  # a rank killed before it began has counted nothing

    def _exclude(self, endpoint: Endpoint) -> None:
        if not endpoint.fiber.ended:
            self.fabric.excluded |= {endpoint.rank}
            self._die(endpoint)

    def _deadlock(self) -> str:
        title = f"deadlock at {self.clock.now:.6f} s: nothing is under way that could end a wait"
        lines = [
            f"  rank {endpoint.rank} waits for {_summary(endpoint.fiber.waiting or ())}"
            for endpoint in self.fabric.endpoints
            if not endpoint.fiber.ended
        ]
        return "\n".join([title, *lines])


class VirtualTransport(Transport):
    """One rank's door to the others in virtual time.

    Tensors of the device "meta" move as sizes without data. A message of more than
    64 KiB is read from its buffer when it is received; its send is done then.
    """

    engine = "virtual"
    models_time = shares_process = True
    needs_memory = False
    has_collectives = progresses = True
    poll_hooks = None

    def __init__(self, endpoint: Endpoint) -> None:
        self.rank = endpoint.rank
        self.size = endpoint.size
        self.traffic = endpoint.traffic
        self.hosts = endpoint.fabric.network.hosts
        self.host = self.hosts[self.rank]
        self.host_names = endpoint.fabric.host_names
        self.original_ranks = range(self.size)
        self.survives = endpoint.fabric.may_fail
        self.meets = endpoint.fabric.meets
        self._endpoint = endpoint
        self._fabric = endpoint.fabric
        self._clock = endpoint.fabric.clock
        self._fiber = endpoint.fiber
        self._handling = endpoint.fabric.handling

    # -- only in a simulation -----------------------------------------------
    @property
    def simulation(self) -> Simulation | None:  # type: ignore[override]
        """This transport itself."""
        return self

    def meet(self, fact: Any) -> list[Any]:
        """See :meth:`Simulation.meet`."""
        return self._endpoint.meet(fact)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """See :meth:`Simulation.once`."""
        known = self._fabric.known
        if key not in known:
            known[key] = make()
        found: T = known[key]
        return found

    def charge_memory(self, nbytes: int) -> None:
        """Let the time pass that the cluster's processes need; it may be none."""
        if self._handling is not None and (seconds := self._handling(nbytes)):
            self._fiber.sleep(seconds)

    def sleep_between(
        self,
        moments: Sequence[float],
        action: Callable[[int], None],
        idle_until: IdleUntil | None = None,
    ) -> None:
        """See :func:`sleep_between`. The rank itself is resumed after the last one."""
        if self._fiber.may_be_spoken_for and moments:
            ScheduledCallbacks(
                self._fiber, self._fabric.callers, moments, action, idle_until
            ).make()
        else:
            sleep_and_call(self, moments, action)

    def reseed(self, *key: int) -> None:
        """Start the random numbers of all ranks anew from the seed and ``key``.

        A run that starts at this time and calls it with the same key goes on with the
        same events. To be called when no message is under way; the last call wins.
        """
        self._clock.reseed(*key)

    def carried(self) -> dict[str, list[int]]:
        """See :meth:`NetworkFigures.carried`: for "out", "in" and "local" the bytes by host."""
        return self._fabric.network.carried()

    # -- time ---------------------------------------------------------------
    def now(self) -> float:
        """Virtual seconds."""
        return self._clock.now

    def sleep(self, seconds: float = 0.0, *, until: float | None = None) -> None:
        """Let virtual time pass for this rank; pauses make it longer."""
        if until is not None:
            self._fiber.sleep_until(max(until, self._clock.now))
            return
        if not seconds >= 0:
            raise ValueError(f"sleep: expected 0 seconds or more, got {seconds}")
        self._fiber.sleep(seconds)

    # -- point to point -----------------------------------------------------
    def isend(
        self,
        buffer: Tensor | Sequence[float],
        dest: int,
        tag: int,
        after: Event | None = None,
    ) -> Request:
        """See :meth:`Transport.isend`; ``after`` is queried every 10 virtual microseconds.

        Numbers are handed over without a tensor.
        """
        self._check(dest, tag)
        if isinstance(buffer, Tensor):
            return self._endpoint.send(buffer, _nbytes(buffer), dest, tag, after)
        return self._endpoint.send_numbers(tuple(map(float, buffer)), dest, tag, after)

    def exclude_from_traffic(self, *tags: int) -> None:
        """See :meth:`Transport.exclude_from_traffic`."""
        self._endpoint.untracked |= set(tags)

    def irecv(self, buffer: Tensor, source: int, tag: int) -> Request:
        """See :meth:`Transport.irecv`."""
        self._check(0 if source == ANY_SOURCE else source, tag)
        return self._endpoint.receive(buffer, _nbytes(buffer), source, tag)

    def _check(self, peer: int, tag: int = 0) -> None:
        if not 0 <= peer < self.size:
            raise ValueError(f"expected a rank from 0 to {self.size - 1}, got {peer}")
        if tag < 0:
            raise ValueError(f"expected a tag of 0 or more, got {tag}")

    def test(self, request: Request) -> bool:
        """See :meth:`Transport.test`. No time passes: a loop around it alone never ends."""
        if request.failed is not None:
            raise PeerFailedError(request.failed, self.host_names[request.failed])
        return request.done

    def wait(self, *requests: Request) -> None:
        """See :meth:`Transport.wait`."""
        for request in requests:
            if not request.done or request.failed is not None:
                self.wait_any([request])

    def wait_any(self, requests: Sequence[Request], timeout: float | None = None) -> int:
        """See :meth:`Transport.wait_any`. Without ``timeout`` only a deadlock ends the wait."""
        if not requests:
            raise ValueError("wait_any: expected one request or more, got none")
        first = -1
        for index, request in enumerate(requests):
            if request.done and (first < 0 or request.order < requests[first].order):
                first = index
        if first < 0:
            first = self._fiber.wait(requests, timeout)
        if first >= 0 and requests[first].failed is not None:
            self.test(requests[first])
        return first

    def wait_set(self) -> WaitSet:
        """See :meth:`Transport.wait_set`. A wait costs the same however many requests there are."""
        return VirtualWaitSet(self._endpoint)

    def cancel(self, request: Request) -> None:
        """See :meth:`Transport.cancel`; the request is done then, with ``nbytes`` 0."""
        if isinstance(request, Operation):
            self._endpoint.cancel(request)

    def abandon(self, target: Request | range) -> None:
        """See :meth:`Transport.abandon`."""
        if isinstance(target, range):
            self._endpoint.abandon_tags(target)
        elif isinstance(target, Operation) and not target.done:
            self._endpoint.abandon(target)

    # -- messages that interrupt --------------------------------------------
    def on_message(
        self, tag: int, nbytes: int, handler: Handler, *, as_numbers: bool = False
    ) -> None:
        """See :meth:`Transport.on_message`. Handlers run before any rank continues at that time."""
        self._check(self.rank, tag)
        register = self._endpoint.register_numbers if as_numbers else self._endpoint.register
        register(tag, nbytes, handler)

    def atomic(self) -> AbstractContextManager[None]:
        """See :meth:`Transport.atomic`. Nothing else runs until a wait, which is refused."""
        return self._fiber.atomic()

    def when_done(self, operation: Request | Event, action: Callable[[], None]) -> None:
        """See :meth:`Transport.when_done`. No virtual time passes between a request and it."""
        if isinstance(operation, Request):
            self._endpoint.when_done(operation, action)
        else:
            self._endpoint.when_happened(operation, action)

    # -- collectives: every rank calls them in the same order ----------------
    def ibarrier(self) -> Request:
        """Done when every rank has called it: dissemination."""
        return self._endpoint.collective("barrier", collectives.barrier)

    def ibroadcast(self, buffer: Tensor, root: int) -> Request:
        """Copy ``buffer`` of ``root`` into everyone's: binomial tree."""
        self._check(root)
        _nbytes(buffer)
        return self._endpoint.collective("broadcast", collectives.broadcast, buffer, root)

    def iallreduce(self, buffer: Tensor, total: Tensor | None = None) -> Request:
        """Sum ``buffer`` over all ranks: a tree if small, else a ring from host to host."""
        _nbytes(buffer)
        reducible = (torch.float32, torch.float64, torch.int64)
        if buffer.dtype not in reducible:
            raise TypeError(
                f"iallreduce adds {', '.join(map(str, reducible))}, not {buffer.dtype}, "
                "which MPI does not add rightly: convert it first"
            )
        if total is None:
            total = buffer
        elif not total.is_meta:
            total.copy_(buffer)
        return self._endpoint.collective("all-reduce", self._allreduce, total)

    def _allreduce(self, channel: Channel, total: Tensor) -> Steps:
        return collectives.allreduce(self._fabric.in_order(channel), total)

    def iallgather(self, buffer: Tensor, gathered: Tensor) -> Request:
        """Collect everyone's ``buffer``: Bruck's algorithm when small, ring otherwise."""
        expected = _nbytes(buffer) * self.size
        if _nbytes(gathered) != expected:
            raise ValueError(
                f"iallgather: expected gathered of {expected} bytes, got {gathered.nbytes}; "
                f"make it {self.size} times as long as buffer"
            )
        return self._endpoint.collective("all-gather", collectives.allgather, buffer, gathered)

    def ialltoall(self, buffer: Tensor, received: Tensor) -> Request:
        """Send the i-th part to rank i: pairwise exchange."""
        if _nbytes(received) != _nbytes(buffer) or buffer.nbytes % self.size:
            raise ValueError(
                f"ialltoall: expected two buffers of one length, a multiple of {self.size} bytes, "
                f"got {buffer.nbytes} and {received.nbytes} bytes"
            )
        return self._endpoint.collective("all-to-all", collectives.alltoall, buffer, received)

    # -- failure and end ------------------------------------------------------
    @property
    def failed(self) -> frozenset[int]:
        """The ranks that have died; known to all at once."""
        return self._fabric.dead

    @property
    def excluded(self) -> frozenset[int]:
        """Those that have paused for too long; known to all at once."""
        return self._fabric.excluded

    def exclude(self, rank: int) -> None:
        """Not here: the cluster itself leaves out who pauses for longer than its ``silence``."""
        raise TransportError(f"rank {rank} cannot be excluded by a rank in virtual time")

    def on_failure(self, action: Callable[[int], None]) -> None:
        """See :meth:`Transport.on_failure`. All ranks are told at the moment of a death."""
        self._endpoint.on_failure.append(action)

    def is_revoked(self, without: int | None = None) -> bool:
        """Never: ranks that fail end no wait but those for them."""
        return False

    def close(self, status: int = 0) -> None:
        """Cancel the posted receives and the handlers; sends under way still arrive."""
        self._endpoint.close()


def _from(start: float, moments: Mapping[int, float]) -> dict[int, float]:
    """Those of ``moments`` that are not past when a run goes on at ``start``."""
    return {rank: moment for rank, moment in moments.items() if not start or moment > start}


def _silences(setup: VirtualCluster) -> dict[int, float]:
    """When each rank that pauses for too long is excluded."""
    if setup.silence is None:
        return {}
    found: dict[int, float] = {}
    for rank in {pause[0] for pause in setup.cluster.pauses}:
        for start, end in setup.cluster.pauses_of(rank).spans:
            if end - start > setup.silence:
                found.setdefault(rank, start + setup.silence)
    return found


def _nbytes(buffer: Tensor) -> int:
    """Return the bytes of a buffer that can be sent or received."""
    if not (buffer.is_meta or buffer.is_cpu) or not buffer.is_contiguous():
        raise ValueError(
            f"expected a contiguous tensor on the CPU, got shape {tuple(buffer.shape)} with "
            f"strides {buffer.stride()} on {buffer.device}; copy it first"
        )
    return buffer.nbytes


def _check_ranks(name: str, ranks: list[int], size: int) -> None:
    for rank in ranks:
        if rank >= size:
            raise UserError(
                f"{name}: expected ranks from 0 to {size - 1}, got {rank}; "
                "name another rank or run more"
            )


def _summary(requests: Collection[Request]) -> str:
    shown = ", ".join(map(repr, islice(requests, 4)))
    return shown + (f" and {len(requests) - 4} more" if len(requests) > 4 else "")
