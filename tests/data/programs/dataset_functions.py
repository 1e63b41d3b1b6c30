"""Functions for ``--dataset package.module:function``, valid and invalid."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from aladdin_mpi.data.datasets import DatasetPair


def split(count: int) -> TensorDataset:
    return TensorDataset(torch.zeros(count, 2, 5, 5), torch.arange(count) % 3)


def both(data_dir: Path) -> tuple[TensorDataset, TensorDataset]:
    assert data_dir.name == "here"
    return split(9), split(3)


def pair() -> DatasetPair:
    return DatasetPair(split(9), split(3), 30, 2, 5, "mine")


def vague() -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
    return [(1.0, 2)], [(1.0, 2)]


def wrong() -> int:
    return 5


def greedy(data_dir: Path, /, path: str) -> tuple[TensorDataset, TensorDataset]:
    return split(9), split(3)
