"""Data and models whose code calls ``sys.exit()``, for ``--dataset quitting:...``."""

from __future__ import annotations

import argparse
import os
import sys

import torch
from torch import Tensor, nn

RANK = os.environ.get("OMPI_COMM_WORLD_RANK", "1")


class Data(torch.utils.data.Dataset[tuple[Tensor, int]]):
    classes = range(2)

    def __init__(self, last: int) -> None:
        self.last = last

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index > self.last and RANK == "1":
            sys.exit(0)  # here
        return torch.ones(4), index % 2


def quitting_data() -> tuple[Data, Data]:
    return Data(0), Data(64)


def no_data() -> None:
    argparse.ArgumentParser().parse_args(["--help"])


def complete_data() -> tuple[Data, Data]:
    return Data(64), Data(64)


def quitting_test_data() -> tuple[Data, Data]:
    return Data(64), Data(0)


class QuittingModel(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if self.training and RANK == "1":
            raise SystemExit
        return super().forward(x)


def quitting_model() -> nn.Module:
    return QuittingModel(4, 2)


def plain_model() -> nn.Module:
    return nn.Linear(4, 2)
