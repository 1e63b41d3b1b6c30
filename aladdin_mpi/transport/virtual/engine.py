"""The simulation engine: all ranks in one process, in turn, under one virtual clock.

Every rank runs its own sequential code in a greenlet. Only ``sleep`` and waits switch
to another rank; between two of them no simulated time passes, so that a loop that only
calls ``test`` never ends. The order of simultaneous events is drawn from the seed: one
seed is one interleaving, which can be reproduced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import islice
from typing import TypeVar

import torch

from aladdin_mpi.errors import TransportError, UserError
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.process.heap import collected_seldom
from aladdin_mpi.transport.base import Request
from aladdin_mpi.transport.virtual.endpoint import Fabric, VirtualTransport
from aladdin_mpi.transport.virtual.fiber import EARLY, VirtualClock

__all__ = ["DeadlockError", "VirtualCluster", "VirtualTransport"]

T = TypeVar("T")


class DeadlockError(TransportError):
    """All ranks wait, and nothing is in flight that could end a wait."""


class VirtualCluster:
    """Ranks that run under one virtual clock.

    Args:
        size: number of ranks.
        cluster: hosts, network and failures.
        seed: determines the order of simultaneous events and the random delays.
        start_time: initial simulated time in seconds, for a run that resumes from a
            checkpoint. Earlier failures are ignored.
        silence: longest pause of a rank in simulated seconds, after which it is excluded
            and ends; None: no limit.

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
        _check_ranks("failures", list(cluster.failures), size)
        _check_ranks("pauses", [pause[0] for pause in cluster.pauses], size)
        self.size = size
        self.cluster = cluster
        self.seed = seed
        self.start_time = start_time
        self.silence = silence

    def run(self, main: Callable[[VirtualTransport], T]) -> list[T | None]:
        """Run ``main(transport)`` on every rank; return the results by rank, None if it failed.

        Raises:
            DeadlockError: every surviving rank waits forever.
            Exception: the first that a rank did not catch; a note names the rank.
        """
        with collected_seldom():
            return _Run(self).run(main)


class _Run:
    """One run: the event loop."""

    def __init__(self, setup: VirtualCluster) -> None:
        self.clock = VirtualClock(setup.seed, setup.start_time)
        # A resumed run starts with all ranks, as over MPI.
        self.failures = _from(setup.start_time, setup.cluster.failures)
        silences = _silences(setup)
        self.silences = _from(setup.start_time, silences)
        may_fail = bool(setup.cluster.failures or silences)
        self.fabric = Fabric(setup.cluster, setup.size, self.clock, may_fail)
        self.fabric.exclude = lambda rank: self._exclude(self.fabric.transports[rank])
        self.running = 0

    def run(self, main: Callable[[VirtualTransport], T]) -> list[T | None]:
        transports, clock = self.fabric.transports, self.clock
        grad_mode = torch.is_grad_enabled()
        results: list[T | None] = [None] * len(transports)
        for transport in transports:
            transport.fiber.start(self._body(transport, main, results))
        for moments, end in (self.failures, self._fail), (self.silences, self._exclude):
            for rank, time in sorted(moments.items()):
                clock.at(max(time, clock.now), end, transports[rank], EARLY)
        self._count_running()
        try:
            if self.running and not clock.run():
                raise DeadlockError(self._deadlock())
        finally:
            for transport in transports:
                transport.fiber.kill()
            torch.set_grad_enabled(grad_mode)
        return results

    def _body(
        self,
        transport: VirtualTransport,
        main: Callable[[VirtualTransport], T],
        results: list[T | None],
    ) -> Callable[[], None]:
        def body() -> None:
            try:
                result = main(transport)
                if not transport.fiber.killed:
                    results[transport.rank] = result
            finally:
                self._set_running(self.running - 1)

        return body

    def _count_running(self) -> None:
        self._set_running(sum(not transport.fiber.ended for transport in self.fabric.transports))

    def _set_running(self, running: int) -> None:
        self.running = running
        if not running:
            self.clock.stop()

    def _fail(self, transport: VirtualTransport) -> None:
        if not transport.fiber.ended:
            self.fabric.remove(transport.rank)
            self._count_running()  # a rank killed before its start has not been subtracted

    def _exclude(self, transport: VirtualTransport) -> None:
        if not transport.fiber.ended:
            self.fabric.excluded |= {transport.rank}
            self._fail(transport)

    def _deadlock(self) -> str:
        title = f"deadlock at {self.clock.now:.6f} s: no pending event can end a wait"
        lines = [
            f"  rank {transport.rank} waits for {_summary(transport.fiber.waiting or ())}"
            for transport in self.fabric.transports
            if not transport.fiber.ended
        ]
        return "\n".join([title, *lines])


def _from(start: float, moments: Mapping[int, float]) -> dict[int, float]:
    """Return the ``moments`` after ``start``, the time at which a run resumes."""
    return {rank: moment for rank, moment in moments.items() if not start or moment > start}


def _silences(setup: VirtualCluster) -> dict[int, float]:
    """Return the time at which each rank that pauses for too long is excluded."""
    silences: dict[int, float] = {}
    for rank in {pause[0] for pause in setup.cluster.pauses}:
        for start, end in setup.cluster.pauses_of(rank).spans:
            if setup.silence is not None and end - start > setup.silence:
                silences.setdefault(rank, start + setup.silence)
    return silences


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
