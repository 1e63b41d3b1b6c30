"""The bound of stale synchronous parallel: nobody gets more than so many steps ahead."""

from __future__ import annotations

from collections.abc import Callable

from aladdin_mpi.model.layout import Bucket


class _Clocks:
    """One bucket's clocks: the steps of each worker, and those whose answer is held back."""

    def __init__(self, workers: int) -> None:
        self.steps = [0] * workers
        self.held: list[int] = []


class StalenessBound:
    """Holds a worker's answer back while it is more than ``bound`` steps ahead of the slowest.

    Every bucket has clocks of its own, for its messages come in an order of their own.

    Args:
        workers: their number.
        buckets: of this server.
        bound: in steps.
        answer: gives a worker its answer for a bucket.
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
        """All workers start a segment with the same model."""
        self._running = set(range(self._workers))
        self._clocks = {bucket.index: _Clocks(self._workers) for bucket in self._buckets}

    def advance(self, worker: int, bucket: Bucket, steps: int = 1) -> int:
        """A worker has done so many more steps; returns how many in all.

        Others may have waited for that.
        """
        clocks = self._clocks[bucket.index]
        clocks.steps[worker] += steps
        self._release(bucket)
        return clocks.steps[worker]

    def hold(self, worker: int, bucket: Bucket) -> None:
        """Answer a worker as soon as the slowest is near enough."""
        self._clocks[bucket.index].held.append(worker)
        self._release(bucket)

    def ended(self, worker: int) -> None:
        """Nobody waits for a worker that has ended, and it waits for nobody."""
        self._running.discard(worker)
        for bucket in self._buckets:
            self._release(bucket)

    def _release(self, bucket: Bucket) -> None:
        clocks = self._clocks[bucket.index]
        if not clocks.held:
            return
        slowest = min((clocks.steps[worker] for worker in self._running), default=0)
        ready = [w for w in clocks.held if self._may_go(w, clocks.steps[w] - slowest)]
        clocks.held = [w for w in clocks.held if w not in ready]
        for worker in ready:
            self._answer(worker, bucket)

    def _may_go(self, worker: int, ahead: int) -> bool:
        return ahead <= self._bound or worker not in self._running
