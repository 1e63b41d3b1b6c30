"""A measured figure with its spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

DIGITS = 4
"""That are written of a measured figure; more would be noise."""


@dataclass(frozen=True)
class Figure:
    """The median of ``count`` measurements, and the range of their middle half."""

    value: float
    low: float
    high: float
    count: int

    def scaled(self, factor: float) -> Figure:
        """The same in another unit."""
        return Figure(self.value * factor, self.low * factor, self.high * factor, self.count)

    @property
    def spread(self) -> str:
        """As it stands beside the figure: ``half of 12 between 0.95 and 0.97``."""
        return self.spread_of("")

    def spread_of(self, what: str) -> str:
        """The same with the name of what was measured, such as ``hosts``."""
        if self.count == 1:
            return f"of one {what.removesuffix('s')}" if what else "measured once"
        counted = f"{self.count} {what}".strip()
        return f"half of {counted} between {short(self.low)} and {short(self.high)}"


def figure(samples: Sequence[float]) -> Figure:
    """Of at least one measurement."""
    if len(samples) == 1:
        return Figure(samples[0], samples[0], samples[0], 1)
    low, _, high = quantiles(samples, n=4, method="inclusive")
    return Figure(median(samples), low, high, len(samples))


def rounded(value: float) -> float:
    """To as many digits as mean something."""
    return float(f"{value:.{DIGITS}g}")


def short(value: float) -> str:
    """As text."""
    return f"{rounded(value):g}"
