"""What a run asks of an algorithm's server."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from aladdin_mpi.model.layout import Bucket
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.parameter_server.server import ParameterServer
from aladdin_mpi.roles.former import Former
from aladdin_mpi.roles.role import Role

if TYPE_CHECKING:
    from torch import Tensor


class Server(Role):
    """A rank that keeps a part of the global model."""

    server: ParameterServer
    optimizer: Optimizer | None
    """Where the server steps on gradients."""

    def resize(self, former: Former) -> None:
        """See :meth:`Role.resize`."""
        self.server.resize(former)
        if self.optimizer is not None:
            mine = [bucket.part for bucket in self.server.buckets]
            self.optimizer.inherit(former.server["optimizer"], mine)

    def part(self, bucket: Bucket) -> Tensor:
        """This server's values."""
        return self.server.values[bucket.index]

    def taken_from(self, worker: int) -> int:
        """Gradients that have come as a whole from a worker in this segment."""
        return self.server.whole_from(worker)

    @abstractmethod
    def finish(self) -> None:
        """Complete the model after the last segment."""
