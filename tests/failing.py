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
    spoilt: range = range(0)
    """Steps of a worker, counted from 1, whose output is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.own_steps = 0
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
            self.own_steps += 1
            if self.own_steps in Net.spoilt:
                x = x * float("nan")
        y: Tensor = self.layers(x)
        return y


def build() -> nn.Module:
    return Net()
