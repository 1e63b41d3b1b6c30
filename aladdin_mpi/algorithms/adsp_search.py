"""ADSP's search of the commit rate: how fast would the loss fall at this rate?"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from aladdin_mpi.model.saved import Stateful, saved

Point = tuple[float, float]
"""Seconds since the search began, and the training loss then."""


class Curve(NamedTuple):
    """``l(t) = 1 / (slope t + offset) + floor``; slope is the paper's a^2."""

    slope: float
    offset: float
    floor: float


def fit(points: Sequence[Point]) -> Curve | None:
    """The curve through three points, in order of time.

    Measured losses need not lie on one. Where they do not fall ever slower, the floor is
    0 and the line ``1/l = slope t + offset`` is fitted by least squares. None: the loss
    does not fall, or is no number.
    """
    (t1, l1), (t2, l2), (t3, l3) = points
    if not l1 > l3 > 0:
        return None
    early = (l1 - l2) * (t3 - t2)
    late = (l2 - l3) * (t2 - t1)
    if early > late > 0:
        floor = l3 - late * (l1 - l3) / (early - late)
        slope = (1 / (l3 - floor) - 1 / (l1 - floor)) / (t3 - t1)
        return Curve(slope, 1 / (l1 - floor) - slope * t1, floor)
    mean_t = (t1 + t2 + t3) / 3
    mean_y = (1 / l1 + 1 / l2 + 1 / l3) / 3
    spread = sum((t - mean_t) ** 2 for t, _ in points)
    slope = sum((t - mean_t) * (1 / loss - mean_y) for t, loss in points) / spread
    return Curve(slope, mean_y - slope * mean_t, 0.0) if slope > 0 else None


def reward(curve: Curve | None, end: float) -> float:
    """``r = a^2 / (1 / (end - c) - b)``: one over the time at which the loss is ``end``.

    0 where it never gets there, infinite where it has been there from the start.
    """
    if curve is None or curve.floor >= end:
        return 0.0
    rest = 1 / (end - curve.floor) - curve.offset
    return curve.slope / rest if rest > 0 else inf


class RateSearch(Stateful):
    """Tries the rates 1, 2, 3, ... in turn while the reward grows.

    ``rate`` is in commits per check period: the one that is tried, or was found.
    """

    SAVED = saved("rate", "active", best="_best")

    def __init__(self) -> None:
        self.rate = 1
        self.active = False
        self._best = -1.0

    def start(self) -> None:
        """Begin at rate 1."""
        self.rate, self.active, self._best = 1, True, -1.0

    def tried(self, value: float, most: int) -> None:
        """The reward of ``rate``: go on to the next one, or back to the one before.

        ``most`` is the largest rate.
        """
        if value > self._best:
            self._best = value
            self.active = self.rate < most
            self.rate += int(self.active)
        else:
            self.active = False
            self.rate -= 1
