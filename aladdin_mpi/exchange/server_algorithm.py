"""Base class of servers: a part of the model, an optimizer, and counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from aladdin_mpi.exchange.server import ParameterServer
from aladdin_mpi.exchange.server_mailbox import ReceivedBucket
from aladdin_mpi.flat.layout import Bucket, Layout
from aladdin_mpi.flat.state import MergedState, saved
from aladdin_mpi.flat.vectors import add
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.worker.role import COMPUTED, SAMPLES, Role


class _Clocks:
    """One bucket's clocks: the steps of each worker, and the workers whose answer is delayed."""

    def __init__(self, workers: int) -> None:
        self.steps = [0] * workers
        self.held: list[int] = []


class StalenessBound:
    """Bound that delays a worker's answer while it is too many steps ahead of the slowest.

    Every bucket has its own clocks, as its messages arrive in their own order.

    Args:
        workers: number of workers.
        buckets: buckets of this server.
        bound: largest distance, in steps.
        answer: sends a worker its answer for a bucket.
    """

    def __init__(
        self,
        workers: int,
        buckets: tuple[Bucket, ...],
        bound: int,
        answer: Callable[[int, Bucket], None],
    ) -> None:
        self._workers = workers
        self._buckets = buckets
        self._bound = bound
        self._answer = answer
        self.open()

    def open(self) -> None:
        """Start a segment, with the same model on all workers."""
        self._running = set(range(self._workers))
        self._clocks = {bucket.index: _Clocks(self._workers) for bucket in self._buckets}

    def advance(self, worker: int, bucket: Bucket, steps: int = 1) -> int:
        """Add steps to a worker's clock; return its total number of steps.

        May release the answers of other workers.
        """
        clocks = self._clocks[bucket.index]
        clocks.steps[worker] += steps
        self._release(bucket)
        return clocks.steps[worker]

    def hold(self, worker: int, bucket: Bucket) -> None:
        """Answer a worker as soon as it is within the bound."""
        self._clocks[bucket.index].held.append(worker)
        self._release(bucket)

    def ended(self, worker: int) -> None:
        """Stop waiting for a worker that has ended, and release its answers."""
        self._running.discard(worker)
        for bucket in self._buckets:
            self._release(bucket)

    def _release(self, bucket: Bucket) -> None:
        clocks = self._clocks[bucket.index]
        if not clocks.held:
            return
        slowest = min((clocks.steps[worker] for worker in self._running), default=0)
        ready = [
            worker
            for worker in clocks.held
            if clocks.steps[worker] - slowest <= self._bound or worker not in self._running
        ]
        clocks.held = [w for w in clocks.held if w not in ready]
        for worker in ready:
            self._answer(worker, bucket)


class ServerAlgorithm(Role):
    """A rank that holds a part of the global model.

    ``n`` is the number of workers; ``applied`` counts the gradients of each bucket.

    Args:
        optimizer: turns gradients into steps with momentum and weight decay; None: workers
            send steps.
        divisor: divisor of gradients; a function is called at every step.
    """

    SAVED = saved("server", "optimizer", "applied")

    def __init__(
        self,
        server: ParameterServer,
        optimizer: Optimizer | None = None,
        divisor: float | Callable[[], float] = 1.0,
    ) -> None:
        self.server = server
        self.optimizer = optimizer
        self._divisor = divisor
        self.n = server.worker_count
        self.applied = {bucket.index: 0 for bucket in server.buckets}

    @property
    def divisor(self) -> float:
        """Current divisor of gradients."""
        return self._divisor() if callable(self._divisor) else self._divisor

    def arrivals(
        self,
        on_end: Callable[[int], None] | None = None,
        look: bool = True,
        at_end: Callable[[], None] | None = None,
    ) -> Iterator[ReceivedBucket]:
        """Yield buckets, to be applied at once, until every worker has ended the segment.

        Arguments as in :meth:`ParameterServer.gradients`.
        """
        for arrival in self.server.gradients(on_end, look, at_end):
            # A worker without samples in a round has not run the loop that sets the learning rates.
            if self.optimizer is not None and arrival.count:
                self.optimizer.adopt(arrival.notes)
            self.applied[arrival.bucket.index] += arrival.count
            yield arrival

    def update(self, arrival: ReceivedBucket) -> None:
        """Compute ``x~ <- x~ - lr g_i / divisor``."""
        x = self.server.values[arrival.bucket.index]
        if self.optimizer is None:
            arrival.add_to(x, -self.server.lr / self.divisor)
        else:
            self.step(arrival.bucket, x, arrival.values)

    def step(self, bucket: Bucket, x: Tensor, g: Tensor) -> None:
        """Update a bucket by one step along ``g``, which is overwritten."""
        lr = self.server.lr / self.divisor
        if self.optimizer is None:
            add(x, g, alpha=-lr)
        else:
            unused = self.server.unused_by_all(bucket, g)
            self.optimizer.descend(bucket.part, g.to(x.dtype), x, lr, unused=unused)

    def complete(self) -> None:
        """Complete the model after the last segment."""

    def part(self, bucket: Bucket) -> Tensor:
        """Return this server's values of a bucket."""
        return self.server.values[bucket.index]

    def taken_from(self, worker: int) -> int:
        """Return the number of complete gradients from a worker in this segment."""
        return self.server.whole_from(worker)

    def counts(self) -> dict[str, int]:
        """Return the gradients applied so far, which must be equal on all buckets."""
        return self.server.books(self.applied)

    # -- another number of ranks ---------------------------------------------------------
    def merged(
        self, states: Sequence[dict[str, Any] | None], layout: Layout
    ) -> dict[str, Any] | None:
        """Merge the states of the servers of a checkpoint; None if all are lost.

        Args:
            states: in the servers' order, without the model; None for a lost server.
            layout: layout of these servers.
        """
        known = [state for state in states if state is not None]
        if not known:
            return None
        counters = self.server.merged([state["server"] for state in known])
        survivors = [self.server.from_survivors(s["server"], self.totals_in(s)) for s in known]
        optimizer = None
        if self.optimizer is not None:
            parts = [[b.part for b in layout.owned_by(server)] for server in range(len(states))]
            own = [None if state is None else state["optimizer"] for state in states]
            optimizer = self.optimizer.joined(own, parts)
        applied = min(survivors) + counters["from_failed"]
        return {**counters, "applied": applied, "optimizer": optimizer}

    def totals_in(self, state: Mapping[str, Any]) -> dict[int, int]:
        """Return the number of gradients in each bucket, from a server's state."""
        totals: dict[int, int] = state["applied"]
        return totals

    def without_states(self, merged: MergedState) -> dict[str, Any]:
        """Return a substitute for :meth:`merged` if every server is lost."""
        computed = int(merged.total(COMPUTED))
        return {
            "samples": int(merged.total(SAMPLES)),
            "received": computed,
            "staleness": 0.0,
            "from_failed": 0,
            "applied": computed,
            "optimizer": None,
        }

    def put_replica(
        self, merged: dict[str, Any], optimizer: dict[str, Any] | None, bucket: Bucket, like: Tensor
    ) -> None:
        """Put a lost server's replica of a bucket's ``optimizer`` into the merged states."""
        if optimizer is not None and self.optimizer is not None:
            whole = merged["optimizer"]
            merged["optimizer"] = self.optimizer.put_part(whole, optimizer, bucket.part, like)

    def resize(self, merged: MergedState) -> None:
        """Restore this server's part of the merged state."""
        self.server.resize(merged)
        self.applied = dict.fromkeys(self.applied, merged.server["applied"])
        if self.optimizer is not None and merged.server["optimizer"] is not None:
            mine = [bucket.part for bucket in self.server.buckets]
            self.optimizer.inherit(merged.server["optimizer"], mine)
