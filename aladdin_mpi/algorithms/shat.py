"""SHAT: asynchronous training with a staleness-weighted blend.

Ko and Kim, Applied Sciences 12, 292 (2022). As in ASP the server updates on every
gradient and answers, but a worker blends the answer into its own model with a weight that
grows with its staleness: ``x_i <- (1 - alpha_i) x_i + alpha_i x~``.
"""

from __future__ import annotations

from math import log, log2

from aladdin_mpi.algorithms.asp import server_optimizer
from aladdin_mpi.algorithms.registry import register
from aladdin_mpi.codec.base import GradientCodec
from aladdin_mpi.exchange.server import ParameterServer
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm
from aladdin_mpi.exchange.server_link import GradientLink
from aladdin_mpi.exchange.server_mailbox import ReceivedBucket
from aladdin_mpi.flat.state import MergedState, saved
from aladdin_mpi.flat.vectors import add
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.options.algorithms import SHAT, ShatOptions, own
from aladdin_mpi.worker.role import TrainingWorker
from aladdin_mpi.worker.worker import Worker


def staleness_weight(others: int, workers: int, base: str) -> float:
    """Return ``alpha_i = 1 - s_i / log n`` with ``s_i = n / c_i``, clamped to [0, 1].

    Args:
        others: c_i, updates by other workers since this worker's last.
        workers: n, the number of surviving workers.
        base: base of the logarithm, "e" or "2"; the paper does not specify it.
    """
    if workers < 2 or others == 0:
        return 0.0
    logarithm = log2(workers) if base == "2" else log(workers)
    return min(1.0, max(0.0, 1 - workers / others / logarithm))


class ShatWorker(TrainingWorker):
    """``x_i <- x_i - lr g_i``, then ``x_i <- (1 - alpha_i) x_i + alpha_i x~``."""

    SAVED = TrainingWorker.SAVED | saved(outbox="link")

    def __init__(
        self, worker: Worker, optimizer: Optimizer, wire: GradientCodec, options: ShatOptions
    ) -> None:
        super().__init__(worker, optimizer)
        self.link = GradientLink(worker, optimizer, wire, momentum=options.momentum == "worker")
        self.updates_itself = options.self_update
        self.divides = options.normalize == "workers"

    def run(self) -> None:
        """Push ``g_i``, update the local model, wait for ``x~`` and blend it in by alpha_i."""
        self.link.open()
        for batch in self.worker.batches():
            g = self.link.push(batch)
            if self.updates_itself:
                add(self.x, g, alpha=-self.worker.lr)
            self.link.pull()
        self.link.close()


class ShatServer(ServerAlgorithm):
    """``x~ <- x~ - lr g_i`` for every gradient, each answered with x~ and alpha_i.

    ``at_last`` holds, for each bucket and worker, the updates at the worker's last answer.
    """

    SAVED = ServerAlgorithm.SAVED | saved("at_last")

    def __init__(self, server: ParameterServer, optimizer: Optimizer, options: ShatOptions) -> None:
        super().__init__(server, *server_optimizer(server, optimizer, options))
        self.log = options.log
        self.at_last = {index: [0] * self.n for index in self.applied}

    def run(self) -> None:
        """Update the model and answer with alpha_i, for every gradient."""
        for arrival in self.arrivals():
            self.update(arrival)
            alpha = staleness_weight(self._others(arrival), self.server.surviving_workers, self.log)
            self.server.send_model(arrival.worker, arrival.bucket, alpha)

    def _others(self, arrival: ReceivedBucket) -> int:
        """Return c_i, the updates by other workers since this worker's last."""
        index, worker = arrival.bucket.index, arrival.worker
        before = self.at_last[index][worker]
        self.at_last[index][worker] = self.applied[index]
        return self.applied[index] - arrival.count - before

    def resize(self, merged: MergedState) -> None:
        """Restore the merged state; all workers have just got a model."""
        super().resize(merged)
        self.at_last = {index: [total] * self.n for index, total in self.applied.items()}


register(
    SHAT,
    worker=lambda worker, optimizer, wire, run: ShatWorker(
        worker, optimizer, wire, own(run, ShatOptions)
    ),
    server=lambda server, optimizer, run: ShatServer(server, optimizer, own(run, ShatOptions)),
)
