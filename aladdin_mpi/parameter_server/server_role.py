"""What every algorithm's server has: a part of the model, an optimizer, its books."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from aladdin_mpi.model.layout import Bucket
from aladdin_mpi.model.saved import saved
from aladdin_mpi.model.vectors import add
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.parameter_server.intake import Arrival
from aladdin_mpi.parameter_server.server import ParameterServer
from aladdin_mpi.roles.former import Former
from aladdin_mpi.roles.role import Role


class Server(Role):
    """A rank that keeps a part of the global model.

    ``n`` is the number of workers; ``applied`` counts the gradients of each bucket.

    Args:
        optimizer: turns gradients into steps with momentum and weight decay; None: what
            comes is a step.
        divisor: what gradients are divided by; a function is asked at every step.
    """

    SAVED = saved("server", "optimizer", "applied")

    def __init__(
        self,
        server: ParameterServer,
        optimizer: Optimizer | None = None,
        divisor: float | Callable[[], float] = 1.0,
    ) -> None:
        self.server = server
        self.optimizer = optimizer
        self._divisor = divisor
        self.n = server.worker_count
        self.applied = {bucket.index: 0 for bucket in server.buckets}

    @property
    def divisor(self) -> float:
        """What gradients are divided by at present."""
        return self._divisor() if callable(self._divisor) else self._divisor

    def arrivals(
        self, on_end: Callable[[int], None] | None = None, look: bool = True
    ) -> Iterator[Arrival]:
        """What comes until every worker has ended the segment, each to be applied at once.

        The arguments as in :meth:`ParameterServer.gradients`.
        """
        for arrival in self.server.gradients(on_end, look):
            # A worker without samples in a round has not run the loop that sets the rates.
            if self.optimizer is not None and arrival.count:
                self.optimizer.adopt(arrival.notes)
            self.applied[arrival.bucket.index] += arrival.count
            yield arrival

    def update(self, arrival: Arrival) -> None:
        """``x~ <- x~ - lr g_i / divisor``."""
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
            unused = self.server.unused_by_all(bucket, g)
            self.optimizer.descend(bucket.part, g.to(x.dtype), x, lr, unused=unused)

    def complete(self) -> None:
        """Complete the model after the last segment."""

    def part(self, bucket: Bucket) -> Tensor:
        """This server's values."""
        return self.server.values[bucket.index]

    def taken_from(self, worker: int) -> int:
        """Gradients that have come as a whole from a worker in this segment."""
        return self.server.whole_from(worker)

    def counts(self) -> dict[str, int]:
        """Gradients applied so far, which must be alike on all buckets."""
        return self.server.books(self.applied)

    def resize(self, former: Former) -> None:
        """See :meth:`Role.resize`."""
        self.server.resize(former)
        self.applied = dict.fromkeys(self.applied, former.server["applied"])
        if self.optimizer is not None and former.server["optimizer"] is not None:
            mine = [bucket.part for bucket in self.server.buckets]
            self.optimizer.inherit(former.server["optimizer"], mine)
