"""SSP, stale synchronous parallel, in two variants.

``always``: Ho et al., NIPS 2013. A worker that has finished c steps continues only if no
other lags by more than ``bound`` steps, and then reads a model with all updates up to
step c - bound.

``on-bound``: Ko et al., IPDPS 2021. A worker applies its gradients to its own model and
continues without the server's, until it is ``bound`` steps past the last one that it read.
"""

from __future__ import annotations

from aladdin_mpi.algorithms.asp import server_optimizer
from aladdin_mpi.algorithms.registry import register
from aladdin_mpi.codec.base import GradientCodec
from aladdin_mpi.exchange.server import ParameterServer
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm, StalenessBound
from aladdin_mpi.exchange.server_link import GradientLink
from aladdin_mpi.flat.state import saved
from aladdin_mpi.flat.vectors import add
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.options.algorithms import SSP, SspOptions, own
from aladdin_mpi.worker.role import TrainingWorker
from aladdin_mpi.worker.worker import Worker


class SspWorker(TrainingWorker):
    """``x_i <- x~`` after every step, or every bound + 1 steps with local steps between."""

    SAVED = TrainingWorker.SAVED | saved(outbox="link")

    def __init__(
        self, worker: Worker, optimizer: Optimizer, wire: GradientCodec, options: SspOptions
    ) -> None:
        super().__init__(worker, optimizer)
        self.link = GradientLink(worker, optimizer, wire, momentum=options.momentum == "worker")
        self.every = 1 if options.pull == "always" else options.bound + 1
        self.coalesces = options.coalesce
        self.divides_own = options.self_update == "workers"
        self.divides = options.normalize == "workers"

    def run(self) -> None:
        """Push ``g_i``; wait for ``x~`` and copy it, or step locally."""
        self.link.open()
        for step, batch in enumerate(self.worker.batches(), start=1):
            g = self.link.push(batch)
            is_due = step % self.every == 0
            if is_due or not self.coalesces:
                self.link.outbox.drain()
            if is_due:
                self.link.pull()
            else:
                divisor = self.worker.divisor if self.divides_own else 1
                add(self.x, g, alpha=-self.worker.lr / divisor)
        self.link.close()


class SspServer(ServerAlgorithm):
    """``x~ <- x~ - lr g_i`` for every gradient, answered once the slowest worker is near enough."""

    def __init__(self, server: ParameterServer, optimizer: Optimizer, options: SspOptions) -> None:
        super().__init__(server, *server_optimizer(server, optimizer, options))
        self.every = 1 if options.pull == "always" else options.bound + 1
        self.clocks = StalenessBound(self.n, server.buckets, options.bound, server.send_model)

    def run(self) -> None:
        """Update the model; answer every ``every`` steps, once the worker is not too far ahead."""
        self.clocks.open()  # all start a segment with the same model
        answered = {index: [0] * self.n for index in self.applied}
        for arrival in self.arrivals(self.clocks.ended):
            self.update(arrival)
            worker, bucket = arrival.worker, arrival.bucket
            clock = self.clocks.advance(worker, bucket, arrival.count)
            if clock - answered[bucket.index][worker] >= self.every:
                answered[bucket.index][worker] = clock
                self.clocks.hold(worker, bucket)


register(
    SSP,
    worker=lambda worker, optimizer, wire, run: SspWorker(
        worker, optimizer, wire, own(run, SspOptions)
    ),
    server=lambda server, optimizer, run: SspServer(server, optimizer, own(run, SspOptions)),
)
