"""A worker that takes several steps by itself between two exchanges."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from aladdin_mpi.compression.codec import GradientCodec
from aladdin_mpi.model.vectors import add, copy
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.parameter_server.inbox import ModelInbox
from aladdin_mpi.parameter_server.outbox import Outbox
from aladdin_mpi.roles.role import TrainingWorker
from aladdin_mpi.roles.worker import Worker

if TYPE_CHECKING:
    from torch import Tensor


class LocalStepWorker(TrainingWorker):
    """Local SGD, and an exchange with the servers when the algorithm says so.

    ``steps`` counts the local steps since the last exchange.

    Args:
        wire: of what is sent, and of the models that come back.
        inbox: where these arrive; None: the usual one.
    """

    def __init__(
        self,
        worker: Worker,
        optimizer: Optimizer,
        wire: GradientCodec,
        inbox: ModelInbox | None = None,
    ) -> None:
        super().__init__(worker, optimizer)
        new_vector = worker.replica.new_vector
        self.g = new_vector()
        self.outbox = Outbox(worker.transport, worker.layout, wire, new_vector, ring=1)
        self.inbox = inbox or ModelInbox(worker.transport, worker.layout, wire)
        self.steps = 0

    def run(self) -> None:
        """Train until the segment's samples are used up."""
        self.inbox.open()
        self.open()
        for _ in self.worker.batches():
            self.local_step()
            self.steps += 1
            if self.is_due():
                self.exchange()
                self.steps = 0
        if self.steps:
            self.leave()
            self.steps = 0
        self.outbox.flush()
        self.inbox.drain_into(self.x)

    def local_step(self) -> None:
        """``x <- x - lr v``, v the gradient with momentum and weight decay."""
        self.compute(self.g)
        self.optimizer.descend(slice(0, self.g.numel()), self.g, self.x, self.worker.lr)

    def compute(self, g: Tensor) -> None:
        """The gradient of the current batch, into ``g``."""
        self.worker.gradient(g)

    def open(self) -> None:
        """A segment begins."""

    @abstractmethod
    def is_due(self) -> bool:
        """Whether to exchange after this step."""

    @abstractmethod
    def exchange(self) -> None:
        """Talk to the servers about the last ``steps`` steps."""

    def leave(self) -> None:
        """The same for the steps that are left at the end of a segment."""
        self.exchange()

    def send(
        self, values: Tensor, less: Tensor | None = None, notes: tuple[float, ...] = ()
    ) -> None:
        """Send ``values``, or ``values - less``, for the ``steps`` gradients in them."""
        vector = self.outbox.begin(self.worker.ticket.start, self.steps, notes)
        copy(vector, values)
        if less is not None:
            add(vector, less, alpha=-1.0)
        for bucket in self.worker.layout.buckets:
            self.outbox.put(bucket)
        self.outbox.end()

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next segment depends on."""
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state from :meth:`state_dict`."""
        super().load_state_dict(state)
        self.steps = state["steps"]
