"""How figures are shown to a person: in the progress, in tables, in messages."""

from __future__ import annotations

from math import isfinite


def number(value: float, digits: int = 4) -> str:
    """Whole numbers in full, ``9,410``, others with as many digits: ``0.03125``, ``1.2e-06``."""
    if isinstance(value, int) or (isfinite(value) and abs(value) >= 10**digits):
        return f"{value:,.0f}"
    return f"{value:,.{digits}g}"


def percent(share: float) -> str:
    """A share from 0 to 1: ``28 %``, ``2.8 %``, ``0.028 %``; ``0 %`` if it is less."""
    value = 100 * share
    if abs(value) < 0.01:
        return "0 %"
    return f"{value:.0f} %" if abs(value) >= 9.95 else f"{value:.2g} %"


def throughput(samples_per_second: float) -> str:
    """``9,410 samples/s``."""
    return f"{number(samples_per_second)} samples/s"


def duration(seconds: float) -> str:
    """``45 s``, ``3:20 min`` or ``2:05:00 h``."""
    whole = round(seconds)
    text = clock(whole)
    return f"{whole} s" if whole < 60 else f"{text} {'h' if whole >= 3600 else 'min'}"


def clock(seconds: float) -> str:
    """``0:45``, ``3:20`` or ``2:05:00``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
