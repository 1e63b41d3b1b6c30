"""Functions for ``--model package.module:function``, valid and invalid."""

from __future__ import annotations

from typing import Any

from torch import nn


def plain() -> nn.Module:
    return nn.Linear(2, 3)


def sized(num_classes: int, image_size: int) -> nn.Module:
    return nn.Linear(image_size, num_classes)


def free(**options: Any) -> nn.Module:
    return nn.Linear(1, **{"out_features": options.pop("num_classes"), **options})


def wrong() -> int:
    return 3


def greedy(num_classes: int, width: int, depth: int = 2, *more: int, head: int) -> int:
    return 3
