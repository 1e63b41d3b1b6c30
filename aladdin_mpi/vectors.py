"""Arithmetic on flat vectors that costs nothing where nothing is calculated.

With timed computing in virtual time vectors are ``meta`` tensors, sizes without
values. torch checks the shapes of every operation on them in Python, which would
take most of the time of a simulation.
"""

from __future__ import annotations

from torch import Tensor


def add(x: Tensor, y: Tensor, alpha: float = 1.0) -> None:
    """``x <- x + alpha y``, in place."""
    if not x.is_meta:
        x.add_(y, alpha=alpha)
