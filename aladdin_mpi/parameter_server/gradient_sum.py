"""Gradients of one bucket, summed in fp32 at least."""

from __future__ import annotations

import torch
from torch import Tensor

from aladdin_mpi.model.vectors import add_if_finite, cut, full
from aladdin_mpi.parameter_server.intake import Arrival


class GradientSum:
    """``g~`` and ``c~``: a running sum and the number of gradients in it.

    The first gradient after :meth:`clear` is not added to zeros but kept where it
    was received, which saves three passes over memory in each round. To the others the
    sum is added, where they were received, and that is the sum from then on.
    """

    def __init__(self, numel: int, largest: int, like: Tensor) -> None:
        self._storage = torch.zeros(largest, dtype=full(like.dtype), device=like.device)
        self._numel = numel
        self.count = 0

    @property
    def values(self) -> Tensor:
        """The sum; meaningless while ``count`` is 0."""
        return cut(self._storage, 0, self._numel)

    def add(self, arrival: Arrival) -> bool:
        """Add an arrived bucket; False: it is refused, as the sum would not be finite.

        It counts in either case: zeros stand in for what is refused.
        """
        refused = arrival.refused
        if self._storage.is_meta:
            pass
        elif self.count and self._is_kept(arrival):
            self._add_to_message(arrival)
        else:
            if not arrival.is_finite:
                arrival.refuse()
            self._add_message(arrival)
        self.count += arrival.count
        return refused or not arrival.refused

    def _add_to_message(self, arrival: Arrival) -> None:
        """Let the message's memory hold the sum; if that fails, the old one is still whole."""
        if arrival.refused:
            return
        if add_if_finite(arrival.values, self.values):
            self._storage = arrival.exchange(self._storage)
        else:
            arrival.refuse()

    def _add_message(self, arrival: Arrival) -> None:
        if self.count:
            arrival.add_to(self.values)
        elif self._is_kept(arrival):
            self._storage = arrival.exchange(self._storage)
        elif arrival.is_dense:
            self.values.copy_(arrival.values)
        else:
            self.values.zero_()
            arrival.add_to(self.values)

    def _is_kept(self, arrival: Arrival) -> bool:
        """Whether the memory that it was received in can hold the sum."""
        return arrival.is_dense and arrival.storage.dtype == self._storage.dtype

    def clear(self) -> None:
        """Start a new sum."""
        self.count = 0
