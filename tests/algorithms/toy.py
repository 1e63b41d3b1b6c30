"""An algorithm from outside the package, as CONTRIBUTING.md says: gradients up, models down."""

from __future__ import annotations

from pydantic import Field

from aladdin_mpi.algorithms.registry import Algorithm, register
from aladdin_mpi.parameter_server.answering import AnsweringServer
from aladdin_mpi.parameter_server.push_pull import PushPullWorker
from aladdin_mpi.roles.settings import OwnOptions, own


class ToyOptions(OwnOptions):
    """For --algorithm toy."""

    divisor: float = Field(
        4.0, gt=0, description="what gradients are divided by", json_schema_extra={"unit": "N"}
    )


class ToyWorker(PushPullWorker):
    """Push the gradient, pull the model."""

    def run(self) -> None:
        """Train until the segment's samples are used up."""
        self.inbox.open()
        for batch in self.worker.batches():
            self.push(batch)
            self.pull()
        self.outbox.flush()
        self.inbox.drain_into(self.x)


register(
    Algorithm(
        "toy",
        lambda worker, optimizer, wire, run: ToyWorker(worker, optimizer, wire, momentum=True),
        lambda server, optimizer, run: AnsweringServer(server, None, own(run, ToyOptions).divisor),
        options=ToyOptions,
        few_bits=True,
        optimizers="by-value",
    )
)
