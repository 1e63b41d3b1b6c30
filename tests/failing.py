"""A model whose training fails at a chosen step."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Failure(Exception):
    """Error raised by :class:`Net`."""


class Net(nn.Module):
    """A network with dropout and batch norm, whose states belong in checkpoints."""

    steps = 0
    last = -1
    """Step that fails, counted over all workers of a simulation."""
    spoilt: range = range(0)
    """Steps whose output is NaN, counted from 1 for each worker."""

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
