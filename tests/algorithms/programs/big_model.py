"""A model of three dense layers, the second of which is by far the largest."""

from __future__ import annotations

from torch import nn


def build(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(image_size**2 * in_channels, 1000, bias=False),
        nn.ReLU(),
        nn.Linear(1000, 2000, bias=False),
        nn.ReLU(),
        nn.Linear(2000, num_classes, bias=False),
    )
