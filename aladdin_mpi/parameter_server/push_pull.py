"""A worker that sends every gradient to the servers and waits for their model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aladdin_mpi.compression.codec import GradientCodec
from aladdin_mpi.control.budget import Ticket
from aladdin_mpi.model.layout import Bucket
from aladdin_mpi.model.vectors import add, scale
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.parameter_server.inbox import ModelInbox
from aladdin_mpi.parameter_server.outbox import Outbox
from aladdin_mpi.roles.former import Former
from aladdin_mpi.roles.role import TrainingWorker
from aladdin_mpi.roles.worker import Worker

if TYPE_CHECKING:
    from torch import Tensor


class PushPullWorker(TrainingWorker):
    """Push a gradient, pull the model, in every step.

    Args:
        momentum: this worker turns its gradients into steps with momentum and weight
            decay; otherwise the server does so.
        ring: gradients on the wire at once.
    """

    def __init__(
        self,
        worker: Worker,
        optimizer: Optimizer,
        wire: GradientCodec,
        momentum: bool = False,
        ring: int = 1,
    ) -> None:
        super().__init__(worker, optimizer)
        self.momentum = momentum
        self.outbox = Outbox(worker.transport, worker.layout, wire, worker.replica.new_vector, ring)
        self.inbox = ModelInbox(worker.transport, worker.layout, wire)

    def run(self) -> None:
        """Train until the segment's samples are used up."""
        self.inbox.open()
        for number, batch in enumerate(self.worker.batches(), start=1):
            self.step(number, batch)
        self.outbox.flush()
        self.inbox.drain_into(self.x)

    def step(self, number: int, batch: Ticket) -> None:
        """One step; ``number`` counts those of the segment from 1."""
        self.push(batch)
        self.pull()

    def push(self, batch: Ticket) -> Tensor:
        """Compute the gradient and send each bucket as it is completed.

        Returns the gradient, to be read only, until the next is begun.
        """
        # Who makes the steps has to know the rates, which are set at the workers.
        notes = () if self.momentum else self.optimizer.settings()
        g = self.outbox.begin(batch.start, self.gradients_in(batch), notes)
        self.worker.gradient(g, self._send(g))
        self.outbox.end()
        return g

    def gradients_in(self, batch: Ticket) -> int:
        """Gradients that go into what is sent for this batch."""
        return int(batch.size > 0)

    def pull(self) -> None:
        """Wait for the model."""
        self.inbox.await_into(self.x)

    def _send(self, g: Tensor) -> Callable[[Bucket], None]:
        def on_bucket(bucket: Bucket) -> None:
            part = bucket.part
            if self.worker.share != 1.0:
                scale(g[part], self.worker.share)
            if self.momentum:
                self.optimizer.correct(part, g[part], self.x[part])
            self.forward(g, bucket)

        return on_bucket

    def forward(self, g: Tensor, bucket: Bucket) -> None:
        """Send a completed bucket."""
        self.outbox.put(bucket)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next segment depends on."""
        return {**super().state_dict(), "outbox": self.outbox.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state from :meth:`state_dict`."""
        super().load_state_dict(state)
        self.outbox.load_state_dict(state["outbox"])

    def resize(self, former: Former) -> None:
        """See :meth:`TrainingWorker.resize`."""
        super().resize(former)
        self.outbox.resize(former, self.worker)


def self_update(x: Tensor, g: Tensor, lr: float) -> None:
    """Local self-update: ``x <- x - lr g``."""
    add(x, g, alpha=-lr)
