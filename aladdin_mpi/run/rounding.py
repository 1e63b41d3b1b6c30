"""How exactly figures are written down: in metrics, summaries and comparisons.

What a run goes on from is not rounded: that is in its checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import floor, isfinite, log10
from typing import Any

DIGITS = 9
"""Significant digits of a figure: as many as tell any two numbers of fp32 apart, ..."""
DECIMALS = 6
"""... and at least so many decimals, so that of large ones, such as a date, nothing is lost."""
SECONDS_DECIMALS = 6
SECONDS_DIGITS = 4
"""Of moments and durations at least, for those of modelled runs that last some microseconds."""
MEASURED_DIGITS = 7
MEASURED = frozenset({"samples_per_second", "bytes_sent_per_step"})
"""Quotients, of which digits far behind the point say nothing."""


def rounded(value: Any, name: str = "") -> Any:
    """A figure, or all of those in a tree of mappings and sequences, as it is written down.

    Integers and what is no number stay as they are; a float stays a float. To round twice
    changes nothing.

    Args:
        value: for JSON.
        name: what the figure is called; in a mapping each has its key.
    """
    if isinstance(value, Mapping):
        return {key: rounded(each, str(key)) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(each, name) for each in value]
    if not isinstance(value, float) or not isfinite(value) or not value:
        return value
    return round(value, _decimals(value, name))


def _decimals(value: float, name: str) -> int:
    before_point = floor(log10(abs(value))) + 1
    if name == "seconds":
        return max(SECONDS_DECIMALS, SECONDS_DIGITS - before_point)
    if name in MEASURED:
        return max(0, MEASURED_DIGITS - before_point)
    return max(DECIMALS, DIGITS - before_point)
