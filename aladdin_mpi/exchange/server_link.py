"""A worker's link to its servers: pushes to them, and the models they send back."""

from __future__ import annotations

from collections.abc import Callable
from math import nan
from typing import Any

from torch import Tensor

from aladdin_mpi.codec.base import GradientCodec
from aladdin_mpi.control.budget import SampleLease
from aladdin_mpi.exchange.worker_mailbox import Model, ModelInbox, Outbox
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.flat.state import MergedPart
from aladdin_mpi.flat.vectors import add, copy, scale
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.worker.worker import Worker


class ServerLink:
    """Link that pushes to the servers and pulls their model into the worker's.

    Args:
        wire: codec of what is pushed and, without ``inbox``, of models.
        inbox: receives models; None: a :class:`ModelInbox`.
        ring: number of vectors on the wire at the same time.
        outbox: sends; None: an :class:`Outbox` with this ``ring``.
    """

    def __init__(
        self,
        worker: Worker,
        wire: GradientCodec,
        inbox: ModelInbox | None = None,
        ring: int = 1,
        outbox: Outbox | None = None,
    ) -> None:
        self.worker = worker
        self.x = worker.parameters
        self.outbox = outbox or Outbox(
            worker.transport, worker.layout, wire, worker.replica.new_vector, ring
        )
        self.inbox = inbox or ModelInbox(worker.transport, worker.layout, wire)

    def open(self) -> None:
        """Start a segment."""
        self.inbox.open()

    def push_values(
        self,
        values: Tensor,
        gradients: int,
        less: Tensor | None = None,
        notes: tuple[float, ...] = (),
    ) -> None:
        """Push ``values``, or ``values - less``, which represent ``gradients`` gradients."""
        vector = self.outbox.begin(self.worker.lease.start, gradients, notes)
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
        """End the segment: deliver all messages, and receive what the servers still send."""
        self.outbox.flush()
        self.inbox.drain_into(self.x)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next segment depends on."""
        return self.outbox.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`."""
        self.outbox.load_state_dict(state)

    def take_merged(self, part: MergedPart) -> None:
        """Restore the state merged from another number of workers."""
        self.outbox.take_merged(part)


class GradientLink(ServerLink):
    """Link that pushes gradients, each bucket as soon as backward has completed it.

    Args:
        momentum: apply momentum and weight decay to gradients before they are pushed;
            otherwise the servers do.
    """

    def __init__(
        self, worker: Worker, optimizer: Optimizer, wire: GradientCodec, momentum: bool = False
    ) -> None:
        super().__init__(worker, wire)
        self.optimizer = optimizer
        self.momentum = momentum
        self.sends_settings = not momentum and bool(optimizer.settings())
        """Whether servers make the steps, with rates that are set at the workers."""

    def push(self, batch: SampleLease) -> Tensor:
        """Compute the gradient and push it.

        Returns the gradient, read-only until the next one starts.
        """
        # The training loop may set rates until backward completes the first bucket.
        notes = None if self.sends_settings else ()
        weight = self.worker.share
        g = self.outbox.begin(batch.start, self.gradients_in(batch), notes, weight)
        self.worker.gradient(g, self._send(g))
        self.outbox.end()
        return g

    def gradients_in(self, batch: SampleLease) -> int:
        """Return the number of gradients in what is pushed for this batch."""
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


class DifferenceInbox(ModelInbox):
    """Inbox that adds to a model the worker's own changes since its last push.

    ``x <- x~ + (x - base)``, ``base <- x~``.
    """

    def __init__(self, worker: Worker, codec: GradientCodec) -> None:
        super().__init__(worker.transport, worker.layout, codec)
        self.base = worker.replica.new_vector()

    def put(self, parameters: Tensor, model: Model, values: Tensor) -> None:
        """Replace one bucket, and add the worker's changes."""
        x, base = model.bucket.of(parameters), model.bucket.of(self.base)
        x.sub_(base)
        base.copy_(values)
        x.add_(base)


class LocalDifference:
    """Local SGD from a pulled model; ``x - base`` is its change since the last push.

    ``steps`` counts the local steps since then.

    Args:
        wire: codec of models.
        codec: codec of differences.
    """

    def __init__(
        self, worker: Worker, optimizer: Optimizer, wire: GradientCodec, codec: GradientCodec
    ) -> None:
        self.worker = worker
        self.optimizer = optimizer
        self.x = worker.parameters
        self.inbox = DifferenceInbox(worker, wire)
        self.link = ServerLink(worker, codec, self.inbox)
        self.base = self.inbox.base
        self.g = worker.replica.new_vector()
        self._clear()
        worker.on_loss(self._add_loss)

    def _clear(self) -> None:
        self.steps = self._loss_count = 0
        self._losses = self._seconds = 0.0

    def open(self) -> None:
        """Start a segment, with nothing to push."""
        self.link.open()
        copy(self.base, self.x)

    def step(self) -> None:
        """Compute ``x <- x - lr v``, with v the gradient with momentum and weight decay."""
        worker, g = self.worker, self.g
        start = worker.transport.now()
        worker.gradient(g)
        whole = slice(0, g.numel())
        self.optimizer.descend(whole, g, self.x, worker.lr, unused=worker.unused(whole))
        self._seconds += worker.transport.now() - start
        self.steps += 1

    def _add_loss(self, loss: float) -> None:
        self._losses += loss
        self._loss_count += 1

    @property
    def step_seconds(self) -> float:
        """Mean time of the local steps since the last push, in seconds."""
        return self._seconds / max(1, self.steps)

    @property
    def loss(self) -> float:
        """Mean loss of the local steps since the last push, without refused ones; NaN if none."""
        self.worker.settle()
        return self._losses / self._loss_count if self._loss_count else nan

    def push(self, *notes: float) -> None:
        """Push ``x - base``, which includes ``steps`` gradients; ``base <- x``."""
        self.link.outbox.drain()  # the last push, which was answered unless the segment ends
        self.link.push_values(self.x, self.steps, less=self.base, notes=notes)
        copy(self.base, self.x)
        self._clear()

    def close(self) -> None:
        """End the segment, after everything has been pushed."""
        self.link.close()
