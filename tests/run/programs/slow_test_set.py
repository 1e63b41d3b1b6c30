"""Data with slow test samples, and models for it, for ``--dataset slow_test_set:data``."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from aladdin_mpi.data.datasets import DatasetPair

STEP = 0.01
"""Minimum duration in seconds of a step of the slow model."""
ITEM = 0.02
"""Duration in seconds of a test sample."""
ITEMS = 100
"""Test samples of ``data``: 2 s for one evaluation."""
MANY_ITEMS = 300
"""Test samples of ``more_data``: an evaluation takes 2 s on three workers, 6 s on rank 0."""


class SlowSet(torch.utils.data.Dataset[tuple[Tensor, int]]):
    def __init__(self, count: int, pause: float) -> None:
        self.count, self.pause = count, pause

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self.pause)
        return torch.full((4,), float(index % 2)), index % 2


class SlowNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(STEP if torch.is_grad_enabled() else 0)
        outputs: Tensor = self.layer(x)
        return outputs


def data() -> DatasetPair:
    return DatasetPair(SlowSet(800, 0.0), SlowSet(ITEMS, ITEM), 2, 0, 0, "slow to test")


def more_data() -> DatasetPair:
    return DatasetPair(SlowSet(800, 0.0), SlowSet(MANY_ITEMS, ITEM), 2, 0, 0, "slow to test")


def slow_net() -> nn.Module:
    return SlowNet()


def linear() -> nn.Module:
    return nn.Linear(4, 2)
