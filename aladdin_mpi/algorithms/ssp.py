"""SSP, stale synchronous parallel, in two readings.

``always``: Ho et al., NIPS 2013. A worker that has finished c steps goes on only if no
other is more than ``bound`` steps behind, and then reads a model with all updates up to
step c - bound.

``on-bound``: Ko et al., IPDPS 2021. A worker applies its gradients to its own model and
goes on without the server's, until it is ``bound`` steps past the last one that it took.
"""

from __future__ import annotations

from aladdin_mpi.algorithms.asp import AspServer, AspWorker
from aladdin_mpi.algorithms.options import SspOptions
from aladdin_mpi.algorithms.push_pull import self_update
from aladdin_mpi.algorithms.server import Arrival, ParameterServer
from aladdin_mpi.algorithms.worker import Worker
from aladdin_mpi.compression.dense import DenseWire
from aladdin_mpi.layout import Bucket
from aladdin_mpi.optimizer import MomentumSGD


class SspWorker(AspWorker):
    """Push ``g_i`` in every step; wait for ``x~`` in every step, or every bound + 1 steps."""

    def __init__(
        self, worker: Worker, optimizer: MomentumSGD, wire: DenseWire, options: SspOptions
    ) -> None:
        super().__init__(worker, optimizer, wire, options)
        self.every = 1 if options.pull == "always" else options.bound + 1
        self.divisor = worker.count if options.self_update == "workers" else 1

    def run(self) -> None:
        """Train until the segment's samples are used up."""
        self.inbox.open()
        for step, batch in enumerate(self.worker.batches(), start=1):
            g = self.push(batch)
            if step % self.every == 0:
                self.outbox.drain()
                self.pull()
            else:
                self_update(self.x, g, self.worker.lr / self.divisor)
        self.outbox.flush()
        self.inbox.drain_into(self.x)


class _Clocks:
    """One bucket's clocks: the gradients of each worker in this segment."""

    def __init__(self, workers: int) -> None:
        self.clock = [0] * workers
        self.answered = [0] * workers
        self.held: list[int] = []


class SspServer(AspServer):
    """``x~ <- x~ - lr g_i``, answered when the slowest worker is near enough."""

    def __init__(
        self, server: ParameterServer, optimizer: MomentumSGD, options: SspOptions
    ) -> None:
        super().__init__(server, optimizer, options)
        self.bound = options.bound
        self.every = 1 if options.pull == "always" else options.bound + 1
        self.begin()

    def begin(self) -> None:
        """All workers start a segment with the same model."""
        self.running = set(range(self.n))
        self.clocks = {bucket.index: _Clocks(self.n) for bucket in self.server.buckets}

    def answer(self, arrival: Arrival) -> None:
        """Hold the answer back while the worker is too far ahead."""
        clocks, worker = self.clocks[arrival.bucket.index], arrival.worker
        clocks.clock[worker] += arrival.count
        if clocks.clock[worker] - clocks.answered[worker] >= self.every:
            clocks.answered[worker] = clocks.clock[worker]
            clocks.held.append(worker)
        self._release(arrival.bucket)

    def ended(self, worker: int) -> None:
        """Nobody waits for a worker that has ended."""
        self.running.discard(worker)
        for bucket in self.server.buckets:
            self._release(bucket)

    def _release(self, bucket: Bucket) -> None:
        clocks = self.clocks[bucket.index]
        if not clocks.held:
            return
        slowest = min(clocks.clock[worker] for worker in self.running)
        ready = [w for w in clocks.held if clocks.clock[w] - slowest <= self.bound]
        clocks.held = [w for w in clocks.held if w not in ready]
        for worker in ready:
            self.server.send_model(worker, bucket)
