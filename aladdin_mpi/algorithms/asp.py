"""ASP, asynchronous parallel: Downpour SGD with one step between exchanges.

Dean et al., Large Scale Distributed Deep Networks, NIPS 2012. The server updates on
every gradient and answers with its model; a worker waits only for its own answer.
"""

from __future__ import annotations

from collections.abc import Callable

from aladdin_mpi.algorithms.registry import register
from aladdin_mpi.codec.base import GradientCodec
from aladdin_mpi.exchange.server import ParameterServer
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm
from aladdin_mpi.exchange.server_link import GradientLink
from aladdin_mpi.flat.state import saved
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.options.algorithms import ASP, AspOptions, own
from aladdin_mpi.worker.role import TrainingWorker
from aladdin_mpi.worker.worker import Worker


class AspWorker(TrainingWorker):
    """``x_i <- x~`` after every gradient."""

    SAVED = TrainingWorker.SAVED | saved(outbox="link")

    def __init__(
        self, worker: Worker, optimizer: Optimizer, wire: GradientCodec, options: AspOptions
    ) -> None:
        super().__init__(worker, optimizer)
        self.link = GradientLink(worker, optimizer, wire, momentum=options.momentum == "worker")
        self.divides = options.normalize == "workers"

    def run(self) -> None:
        """Push ``g_i``, wait for ``x~``, and copy it."""
        self.link.open()
        for batch in self.worker.batches():
            self.link.push(batch)
            self.link.pull()
        self.link.close()


class AspServer(ServerAlgorithm):
    """``x~ <- x~ - lr g_i`` for every gradient, each answered at once."""

    def __init__(self, server: ParameterServer, optimizer: Optimizer, options: AspOptions) -> None:
        super().__init__(server, *server_optimizer(server, optimizer, options))

    def run(self) -> None:
        """Update the model and answer, for every gradient."""
        for arrival in self.arrivals():
            self.update(arrival)
            self.server.send_model(arrival.worker, arrival.bucket)


def server_optimizer(
    server: ParameterServer, optimizer: Optimizer, options: AspOptions
) -> tuple[Optimizer | None, Callable[[], float]]:
    """Return the server's optimizer (None if workers apply momentum) and the divisor."""
    divides = options.normalize == "workers"
    return (
        optimizer if options.momentum == "server" else None,
        lambda: server.divisor if divides else 1.0,
    )


register(
    ASP,
    worker=lambda worker, optimizer, wire, run: AspWorker(
        worker, optimizer, wire, own(run, AspOptions)
    ),
    server=lambda server, optimizer, run: AspServer(server, optimizer, own(run, AspOptions)),
)
