"""Local SGD whose exchange is a difference pushed and the model pulled."""

from __future__ import annotations

from math import isfinite, nan
from typing import TYPE_CHECKING, Any

from aladdin_mpi.compression.codec import GradientCodec
from aladdin_mpi.model.vectors import copy
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.parameter_server.inbox import Model, ModelInbox
from aladdin_mpi.parameter_server.local_steps import LocalStepWorker
from aladdin_mpi.roles.former import Former
from aladdin_mpi.roles.worker import Worker

if TYPE_CHECKING:
    from torch import Tensor


class DifferenceInbox(ModelInbox):
    """Models are taken with what the worker has moved since it pushed.

    ``x <- x~ + (x - base)``, ``base <- x~``.
    """

    def __init__(self, worker: Worker, codec: GradientCodec) -> None:
        super().__init__(worker.transport, worker.layout, codec)
        self.base = worker.replica.new_vector()

    def put(self, parameters: Tensor, model: Model, values: Tensor) -> None:
        """Take one bucket."""
        x, base = parameters[model.bucket.part], self.base[model.bucket.part]
        x.sub_(base)
        base.copy_(values)
        x.add_(base)


class DifferenceWorker(LocalStepWorker):
    """Local SGD from a pulled model; ``x - base`` is what it has moved since it last pushed.

    Args:
        wire: of models.
        codec: of differences.
    """

    def __init__(
        self, worker: Worker, optimizer: Optimizer, wire: GradientCodec, codec: GradientCodec
    ) -> None:
        inbox = DifferenceInbox(worker, wire)
        super().__init__(worker, optimizer, codec, inbox)
        self.base = inbox.base
        self._losses = 0.0
        self._seconds = 0.0
        self._timed = self._sound = 0

    def open(self) -> None:
        """Between segments nothing is left to be pushed."""
        copy(self.base, self.x)

    def local_step(self) -> None:
        """A local step, its loss and its time noted."""
        now = self.worker.transport.now
        start = now()
        super().local_step()
        self._seconds += now() - start
        self._timed += 1
        if isfinite(self.worker.loss):
            self._losses += self.worker.loss
            self._sound += 1

    @property
    def step_seconds(self) -> float:
        """Mean time of the local steps since the last push."""
        return self._seconds / max(1, self._timed)

    @property
    def loss(self) -> float:
        """Mean loss of the local steps since the last push, less those refused; NaN: of none."""
        return self._losses / self._sound if self._sound else nan

    def push(self, *notes: float) -> None:
        """Send ``x - base``, which holds ``steps`` gradients; ``base <- x``."""
        self.outbox.drain()  # what was pushed before: it has been answered, or the segment ends
        self.send(self.x, less=self.base, notes=notes)
        copy(self.base, self.x)
        self._losses = self._seconds = 0.0
        self._timed = self._sound = 0

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
