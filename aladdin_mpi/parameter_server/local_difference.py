"""Local SGD that pushes what it has moved and takes models as they come."""

from __future__ import annotations

from math import nan

from torch import Tensor

from aladdin_mpi.compression.codec import GradientCodec
from aladdin_mpi.model.vectors import copy
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.parameter_server.inbox import Model, ModelInbox
from aladdin_mpi.parameter_server.server_link import ServerLink
from aladdin_mpi.roles.worker import Worker


class DifferenceInbox(ModelInbox):
    """Models are taken with what the worker has moved since it pushed.

    ``x <- x~ + (x - base)``, ``base <- x~``.
    """

    def __init__(self, worker: Worker, codec: GradientCodec) -> None:
        super().__init__(worker.transport, worker.layout, codec)
        self.base = worker.replica.new_vector()

    def put(self, parameters: Tensor, model: Model, values: Tensor) -> None:
        """Take one bucket."""
        x, base = model.bucket.of(parameters), model.bucket.of(self.base)
        x.sub_(base)
        base.copy_(values)
        x.add_(base)


class LocalDifference:
    """Local SGD from a pulled model; ``x - base`` is what it has moved since the last push.

    ``steps`` counts the local steps since then.

    Args:
        wire: of models.
        codec: of differences.
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
        self.steps = self._sound = 0
        self._losses = self._seconds = 0.0

    def open(self) -> None:
        """A segment begins, with nothing left to be pushed."""
        self.link.open()
        copy(self.base, self.x)

    def step(self) -> None:
        """``x <- x - lr v``, v the gradient with momentum and weight decay."""
        worker, g = self.worker, self.g
        start = worker.transport.now()
        worker.gradient(g)
        whole = slice(0, g.numel())
        self.optimizer.descend(whole, g, self.x, worker.lr, unused=worker.unused(whole))
        self._seconds += worker.transport.now() - start
        self.steps += 1

    def _add_loss(self, loss: float) -> None:
        self._losses += loss
        self._sound += 1

    @property
    def step_seconds(self) -> float:
        """Mean time of the local steps since the last push."""
        return self._seconds / max(1, self.steps)

    @property
    def loss(self) -> float:
        """Mean loss of the local steps since the last push, less those refused; NaN: of none."""
        self.worker.settle()
        return self._losses / self._sound if self._sound else nan

    def push(self, *notes: float) -> None:
        """Push ``x - base``, which holds ``steps`` gradients; ``base <- x``."""
        self.link.outbox.drain()  # the last push: it has been answered, or the segment ends
        self.link.push_values(self.x, self.steps, less=self.base, notes=notes)
        copy(self.base, self.x)
        self._clear()

    def close(self) -> None:
        """The segment ends, and all is pushed."""
        self.link.close()
