"""A worker's link to its servers: what it sends them, and the models that they send back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from aladdin_mpi.compression.codec import GradientCodec
from aladdin_mpi.control.budget import Ticket
from aladdin_mpi.model.layout import Bucket
from aladdin_mpi.model.vectors import add, copy, scale
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.parameter_server.inbox import ModelInbox
from aladdin_mpi.parameter_server.outbox import Outbox
from aladdin_mpi.roles.former import Former
from aladdin_mpi.roles.worker import Worker


class ServerLink:
    """Pushes to the servers and pulls their model into the worker's.

    Args:
        wire: of what is pushed and, without ``inbox``, of models.
        inbox: where models arrive; None: the usual one.
        ring: vectors on the wire at once.
    """

    def __init__(
        self,
        worker: Worker,
        wire: GradientCodec,
        inbox: ModelInbox | None = None,
        ring: int = 1,
    ) -> None:
        self.worker = worker
        self.x = worker.parameters
        self.outbox = Outbox(worker.transport, worker.layout, wire, worker.replica.new_vector, ring)
        self.inbox = inbox or ModelInbox(worker.transport, worker.layout, wire)

    def open(self) -> None:
        """A segment begins."""
        self.inbox.open()

    def push_values(
        self,
        values: Tensor,
        gradients: int,
        less: Tensor | None = None,
        notes: tuple[float, ...] = (),
    ) -> None:
        """Push ``values``, or ``values - less``, which stand for so many gradients."""
        vector = self.outbox.begin(self.worker.ticket.start, gradients, notes)
        copy(vector, values)
        if less is not None:
            add(vector, less, alpha=-1.0)
        for bucket in self.worker.layout.buckets:
            self.outbox.put(bucket)
        self.outbox.end()

    def pull(self) -> None:
        """Wait for the model."""
        self.inbox.await_into(self.x)

    def close(self) -> None:
        """The segment's last push is made: deliver all, and take what the servers still send."""
        self.outbox.flush()
        self.inbox.drain_into(self.x)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next segment depends on."""
        return self.outbox.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state from :meth:`state_dict`."""
        self.outbox.load_state_dict(state)

    def resize(self, former: Former) -> None:
        """Go on with what other numbers of workers have held back, in the mean."""
        self.outbox.resize(former, self.worker)


class GradientLink(ServerLink):
    """Pushes gradients, each bucket as soon as backward has completed it.

    Args:
        momentum: gradients become steps, with momentum and weight decay, before they are
            pushed; otherwise the server does that.
    """

    def __init__(
        self, worker: Worker, optimizer: Optimizer, wire: GradientCodec, momentum: bool = False
    ) -> None:
        super().__init__(worker, wire)
        self.optimizer = optimizer
        self.momentum = momentum
        self.sends_settings = not momentum and bool(optimizer.settings())
        """The servers make the steps, by rates that are set at the workers."""

    def push(self, batch: Ticket) -> Tensor:
        """Compute the gradient and push it.

        Returns the gradient, to be read only, until the next is begun.
        """
        # The training loop may set rates until backward completes the first bucket.
        notes = None if self.sends_settings else ()
        weight = self.worker.share
        g = self.outbox.begin(batch.start, self.gradients_in(batch), notes, weight)
        self.worker.gradient(g, self._send(g))
        self.outbox.end()
        return g

    def gradients_in(self, batch: Ticket) -> int:
        """Gradients that go into what is pushed for this batch."""
        return int(batch.size > 0)

    def _send(self, g: Tensor) -> Callable[[Bucket], None]:
        def on_bucket(bucket: Bucket) -> None:
            if self.sends_settings and bucket.index == 0:
                self.outbox.announce(self.optimizer.settings())
            mine = bucket.of(g)
            if self.worker.share != 1.0:
                scale(mine, self.worker.share)
            if self.momentum:
                part, unused = bucket.part, self.worker.unused(bucket.part)
                self.optimizer.correct(part, mine, bucket.of(self.x), unused=unused)
            self.forward(g, bucket)

        return on_bucket

    def forward(self, g: Tensor, bucket: Bucket) -> None:
        """Send a completed bucket."""
        self.outbox.put(bucket)
