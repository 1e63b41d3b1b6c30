"""An algorithm outside the package that pushes gradients and pulls models."""

from __future__ import annotations

from pydantic import Field

from aladdin_mpi.algorithms.registry import register
from aladdin_mpi.codec.base import GradientCodec
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm
from aladdin_mpi.exchange.server_link import GradientLink
from aladdin_mpi.flat.state import saved
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.options.algorithms import Algorithm, OwnOptions, own
from aladdin_mpi.worker.role import TrainingWorker
from aladdin_mpi.worker.worker import Worker


class ToyOptions(OwnOptions):
    """For --algorithm toy."""

    divisor: float = Field(
        4.0, gt=0, description="what gradients are divided by", json_schema_extra={"unit": "N"}
    )


class ToyWorker(TrainingWorker):
    """Pushes gradients and pulls models."""

    SAVED = TrainingWorker.SAVED | saved(outbox="link")

    def __init__(self, worker: Worker, optimizer: Optimizer, wire: GradientCodec) -> None:
        super().__init__(worker, optimizer)
        self.link = GradientLink(worker, optimizer, wire, momentum=True)

    def run(self) -> None:
        """Train until the segment's samples are used up."""
        self.link.open()
        for batch in self.worker.batches():
            self.link.push(batch)
            self.link.pull()
        self.link.close()


class ToyServer(ServerAlgorithm):
    """Applies gradients and answers with models."""

    def run(self) -> None:
        """Serve until every worker has ended the segment."""
        for arrival in self.arrivals():
            self.update(arrival)
            self.server.send_model(arrival.worker, arrival.bucket)


register(
    Algorithm("toy", ToyOptions, has_servers=True, quantises=True, optimizers="by-value"),
    worker=lambda worker, optimizer, wire, run: ToyWorker(worker, optimizer, wire),
    server=lambda server, optimizer, run: ToyServer(server, None, own(run, ToyOptions).divisor),
)
