"""Models whose parameters have no values yet."""

from __future__ import annotations

from torch import nn


def lazy(*_: object) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(10))


def meta(*_: object) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10, device="meta"))
