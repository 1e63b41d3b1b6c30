"""Types for the benchmarks' options: numbers within bounds, and folders.

They reject invalid values before anything runs; argparse adds the option's name to the message.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path


def whole(least: int = 1) -> Callable[[str], int]:
    """Return an option type: a whole number of at least ``least``."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(
                f"expected a whole number of at least {least}, got {text!r}"
            )
        return value

    return read


def positive(text: str) -> float:
    """Parse an option's value: a number above 0."""
    return _number(text, lambda value: value > 0, "a number above 0")


def at_least(least: float) -> Callable[[str], float]:
    """Return an option type: a number of at least ``least``."""
    return lambda text: _number(
        text, lambda value: value >= least, f"a number of at least {least:g}"
    )


def share(text: str) -> float:
    """Parse an option's value: a number from 0 to 1."""
    return _number(text, lambda value: 0 <= value <= 1, "a number from 0 to 1")


def _number(text: str, fits: Callable[[float], bool], expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and fits(value)):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return value


def folder(text: str) -> Path:
    """Parse an option's value: a folder, or a path at which one can be created."""
    path = Path(text)
    for place in (path, *path.parents):
        if place.exists():
            if not place.is_dir():
                raise argparse.ArgumentTypeError(
                    f"expected a folder or a path for one, got {text!r}, and {str(place)!r} is "
                    "a file; give another"
                )
            break
    return path


def data_file(text: str) -> Path:
    """Parse an option's value: a file, or a path at which one can be created."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file, got the folder {text!r}; name a file")
    folder(str(path.parent))
    return path
