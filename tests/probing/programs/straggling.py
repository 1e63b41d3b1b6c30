"""Models whose steps take much longer on rank 1 than on other ranks."""

from __future__ import annotations

import time

from mpi4py import MPI
from torch import Tensor, nn


class Slow(nn.Sequential):
    """A layer that sleeps for ``seconds``, and for ``straggling`` on rank 1."""

    seconds, straggling = 0.1, 0.4

    def forward(self, images: Tensor) -> Tensor:
        time.sleep(self.straggling if self.is_straggler(images) else self.seconds)
        y: Tensor = super().forward(images)
        return y

    def is_straggler(self, images: Tensor) -> bool:
        return MPI.COMM_WORLD.rank == 1


class Hanging(Slow):
    """A layer that hangs on rank 1 with any batch of more than one sample."""

    straggling = 1000.0

    def is_straggler(self, images: Tensor) -> bool:
        return len(images) > 1 and super().is_straggler(images)


def slow(num_classes: int) -> nn.Module:
    return Slow(nn.Flatten(), nn.Linear(64, num_classes))


def hanging(num_classes: int) -> nn.Module:
    return Hanging(nn.Flatten(), nn.Linear(64, num_classes))
