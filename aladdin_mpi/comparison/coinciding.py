"""Curves that lie on each other, drawn so that each is seen: as dashes in turn.

Where several curves coincide, the one drawn last would hide the others. Their dashes therefore
follow one another along the common way, wide and narrow in turn, so that they differ without
colour too; and each has its markers at points of its own. A thin line below the dashes goes on
where a curve leaves the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Path = npt.NDArray[np.float64]
"""A curve as it is seen, of shape (points, 2), in points of 1/72 inch."""

NEAR = 2.0
"""Points between two curves that touch, about a line's width."""
SHARE = 0.5
"""Of its length, that a curve has to have in common with another to be taken for the same."""
SAMPLES = 400
"""Places of a curve that are looked at."""
DASH = 8.0
WIDTH = 1.6
WIDTHS = (2.6, 1.4)
"""Of a curve alone, and of those that coincide, in turn; in points, like the dash."""
THIN = 0.7
MARKER = 6.0
LARGER = 5.0
"""The size of a marker, and how much larger each further one is at the same point."""
MOST_MARKERS = 15


@dataclass(frozen=True)
class Part:
    """A curve's part in drawing those it coincides with: it is number ``place`` of ``count``."""

    place: int = 0
    count: int = 1

    @property
    def width(self) -> float:
        """Of its line."""
        return WIDTH if self.count == 1 else WIDTHS[self.place % len(WIDTHS)]

    def line(self, style: str, dash: float = DASH) -> dict[str, Any]:
        """How its line is drawn; alone, in ``style``."""
        # The wide ones lie below.
        look: dict[str, Any] = {"lw": self.width, "zorder": 2 + 0.1 * (self.place % len(WIDTHS))}
        if self.count == 1:
            return {**look, "ls": style}
        on, off = dash, dash * (self.count - 1)
        start = dash * (self.count - self.place)
        # matplotlib counts the lengths of dashes in widths of their line.
        lengths = [length / self.width for length in (start, on, off)]
        return {**look, "ls": (lengths[0], tuple(lengths[1:])), "dash_capstyle": "butt"}

    def markers(self, points: int) -> dict[str, Any]:
        """Which of its points are marked, and how large."""
        every = max(1, points // MOST_MARKERS)
        marked = -(-points // every)
        turns = min(self.count, marked)
        layer = self.place // turns
        return {
            "markevery": slice(every * (self.place % turns), None, every * turns),
            "ms": MARKER + LARGER * layer,
            "zorder": 3 - 0.01 * layer,
        }


def parts(paths: Sequence[Path]) -> list[Part]:
    """Of each curve its part among those that all coincide with each other."""
    seen = [_along(path) for path in paths]
    groups: list[list[int]] = []
    for number, path in enumerate(seen):
        for group in groups:
            if all(_coincide(path, seen[other]) for other in group):
                group.append(number)
                break
        else:
            groups.append([number])
    found = {n: Part(place, len(group)) for group in groups for place, n in enumerate(group)}
    return [found[number] for number in range(len(seen))]


def _along(path: Path) -> Path:
    """Places at equal distances along a curve."""
    path = path[np.isfinite(path).all(axis=1)]
    lengths = np.hypot(*np.diff(path, axis=0).T)
    way = np.concatenate([[0.0], np.cumsum(lengths)])
    places = np.linspace(0.0, way[-1], SAMPLES)
    return np.stack([np.interp(places, way, path[:, axis]) for axis in (0, 1)], axis=1)


def _coincide(one: Path, other: Path) -> bool:
    distances = np.hypot(*(one[:, None] - other[None]).transpose(2, 0, 1))
    return all((distances.min(axis=axis) <= NEAR).mean() >= SHARE for axis in (0, 1))
