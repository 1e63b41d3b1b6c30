"""Define a data set and a model to train with the command.

cd examples
mpirun -np 4 python -m aladdin_mpi.train --model own_data:net --dataset own_data:data
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Spirals(Dataset[tuple[Tensor, int]]):
    """Points on two spirals in the plane, labelled with the spiral."""

    classes = ("left", "right")

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(count) % 2
        turn = 1 + 6 * torch.rand(count, generator=generator)
        angle = turn + torch.pi * self.labels
        points = torch.stack([turn * angle.cos(), turn * angle.sin()], 1) / 7
        self.points = points + 0.02 * torch.randn(count, 2, generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.points[index], int(self.labels[index])


def data() -> tuple[Spirals, Spirals]:
    """Return the training and the test set."""
    return Spirals(4000, seed=1), Spirals(1000, seed=2)


def net(num_classes: int) -> nn.Module:
    """Return an MLP that maps points (N, 2) to (N, num_classes)."""
    return nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, num_classes)
    )
