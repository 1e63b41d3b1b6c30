"""Gradients of one bucket, summed in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from aladdin_mpi.algorithms.server import Arrival


class GradientSum:
    """``g~`` and ``c~``: a running sum and the number of gradients in it.

    The first gradient after :meth:`clear` is not added to zeros but kept where it
    was received, which saves three passes over memory in each round.
    """

    def __init__(self, numel: int, largest: int, like: Tensor) -> None:
        self._storage = torch.zeros(largest, dtype=torch.float32, device=like.device)
        self._numel = numel
        self.count = 0

    @property
    def values(self) -> Tensor:
        """The sum; meaningless while ``count`` is 0."""
        return self._storage[: self._numel]

    def add(self, arrival: Arrival) -> None:
        """Add an arrived bucket."""
        if self._storage.is_meta:
            pass
        elif self.count:
            arrival.add_to(self.values)
        elif arrival.is_dense and arrival.storage.dtype == torch.float32:
            self._storage = arrival.exchange(self._storage)
        elif arrival.is_dense:
            self.values.copy_(arrival.values)
        else:
            self.values.zero_()
            arrival.add_to(self.values)
        self.count += arrival.count

    def clear(self) -> None:
        """Start a new sum."""
        self.count = 0
