"""A model whose training can be made to fail at a step."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Failure(Exception):
    """What :class:`Net` raises."""


class Net(nn.Module):
    """Has dropout and batch norm, whose states belong into a checkpoint too."""

    steps = 0
    last = -1
    """The step, counted over all workers of a simulation, that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(16, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            Net.steps += 1
            if Net.steps == Net.last:
                raise Failure
        y: Tensor = self.layers(x)
        return y


def build() -> nn.Module:
    return Net()
