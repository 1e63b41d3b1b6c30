"""A small convolutional network with batch norm and dropout, for ``--model small_net:build``."""

from __future__ import annotations

from torch import nn


def build() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(288, 10),
    )
