"""A server that applies every gradient as soon as it comes, and answers it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aladdin_mpi.model.layout import Bucket
from aladdin_mpi.model.vectors import add
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.parameter_server.server import Arrival, ParameterServer
from aladdin_mpi.parameter_server.server_role import Server
from aladdin_mpi.roles.former import Former

if TYPE_CHECKING:
    from torch import Tensor


class AnsweringServer(Server):
    """``x~ <- x~ - lr g_i / divisor`` for every arrival; an algorithm says what the answer is.

    Args:
        optimizer: turns gradients into steps with momentum and weight decay; None: what
            comes is a step.
        divisor: what gradients are divided by.
    """

    look = True
    """Whether arrivals are looked at for values that are not finite before :meth:`apply`."""

    def __init__(
        self, server: ParameterServer, optimizer: Optimizer | None, divisor: float = 1.0
    ) -> None:
        self.server = server
        self.optimizer = optimizer
        self.divisor = divisor
        self.n = server.worker_count
        self.applied = {bucket.index: 0 for bucket in server.buckets}

    def run(self) -> None:
        """Serve until every worker has ended the segment."""
        self.begin()
        for arrival in self.server.gradients(self.ended, self.look):
            if self.optimizer is not None:
                self.optimizer.adopt(arrival.notes)
            self.apply(arrival)
            self.applied[arrival.bucket.index] += arrival.count
            self.answer(arrival)

    def begin(self) -> None:
        """A segment begins."""

    def apply(self, arrival: Arrival) -> None:
        """Update the model."""
        x = self.server.values[arrival.bucket.index]
        if self.optimizer is None:
            arrival.add_to(x, -self.server.lr / self.divisor)
        else:
            self.step(arrival.bucket, x, arrival.values)

    def step(self, bucket: Bucket, x: Tensor, g: Tensor) -> None:
        """One step of a bucket along ``g``, which is overwritten."""
        lr = self.server.lr / self.divisor
        if self.optimizer is None:
            add(x, g, alpha=-lr)
        else:
            self.optimizer.descend(bucket.part, g.to(x.dtype), x, lr)

    def answer(self, arrival: Arrival) -> None:
        """Send the model back."""
        self.server.send_model(arrival.worker, arrival.bucket)

    def ended(self, worker: int) -> None:
        """A worker has no more gradients in this segment, or has failed."""

    def finish(self) -> None:
        """Nothing is left to be applied."""

    def counts(self) -> dict[str, int]:
        """Gradients applied so far, which must be alike on all buckets."""
        return self.server.books(self.applied)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next segment depends on."""
        return {
            "server": self.server.state_dict(),
            "optimizer": self.optimizer.state_dict() if self.optimizer else None,
            "applied": self.applied,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state from :meth:`state_dict`."""
        self.server.load_state_dict(state["server"])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        self.applied = state["applied"]

    def resize(self, former: Former) -> None:
        """See :meth:`Server.resize`."""
        super().resize(former)
        self.applied = dict.fromkeys(self.applied, former.server["applied"])
