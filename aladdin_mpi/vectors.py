"""Arithmetic on flat vectors that costs nothing where nothing is calculated.

With timed computing in virtual time vectors are ``meta`` tensors, sizes without
values. torch checks the shapes of every operation on them in Python, which would
take most of the time of a simulation.
"""

from __future__ import annotations

import torch
from torch import Tensor


def add(x: Tensor, y: Tensor, alpha: float = 1.0) -> None:
    """``x <- x + alpha y``, in place."""
    if not x.is_meta:
        x.add_(y, alpha=alpha)


def copy(x: Tensor, y: Tensor) -> None:
    """``x <- y``."""
    if not x.is_meta:
        x.copy_(y)


def scale(x: Tensor, factor: float) -> None:
    """``x <- factor x``, in place."""
    if not x.is_meta:
        x.mul_(factor)


def clear(x: Tensor) -> None:
    """``x <- 0``, whatever it held."""
    if not x.is_meta:
        x.zero_()


def lerp(x: Tensor, y: Tensor, weight: float) -> None:
    """``x <- (1 - weight) x + weight y``, in place; ``y`` may be of another dtype or device."""
    if not x.is_meta:
        x.lerp_(y.to(x.device, x.dtype), weight)


def host_vector(like: Tensor) -> Tensor:
    """A zeroed vector like ``like``, in the host's memory where it has any."""
    return torch.zeros_like(like, device="meta" if like.is_meta else "cpu")
