"""Datasets that cannot be trained on, for ``--dataset bad_sets:...``."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Set(torch.utils.data.Dataset[tuple[Tensor, int]]):
    classes = range(2)

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.ones(4), [0, 1][index]


class Ragged(Set):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.ones(4 + index), index


def no_train() -> tuple[Set, Set]:
    return Set(0), Set(2)


def no_test() -> tuple[Set, Set]:
    return Set(2), Set(0)


def ragged() -> tuple[Set, Set]:
    return Ragged(2), Ragged(2)


def model() -> nn.Module:
    return nn.Linear(4, 2)
