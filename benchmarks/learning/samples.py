"""How many samples one run takes to another's training loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Lines = Sequence[Mapping[str, Any]]
POINTS = 400
"""Of a mean curve."""


def curve(runs: Sequence[Lines], grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean over the seeds of the loss at each of ``grid``'s samples.

    A line's loss is the mean since the line before, and stands in the middle between the two;
    between these points it is a straight line.
    """
    curves = []
    for run in runs:
        stops = np.array([0.0] + [line["samples"] for line in run])
        losses = np.array([line["loss"] for line in run])
        curves.append(np.interp(grid, (stops[1:] + stops[:-1]) / 2, losses))
    return np.asarray(np.mean(curves, axis=0))


def ratio(ours: Sequence[Lines], base: Sequence[Lines], share: float) -> float | None:
    """Samples of ``ours`` over those of ``base`` to its loss after ``share`` of its samples.

    None if ours never comes there.
    """
    total = base[0][-1]["samples"]
    grid = np.linspace(0, total, POINTS + 1)
    loss = curve(base, np.array([share * total]))[0]
    there = np.flatnonzero(curve(ours, grid) <= loss)
    return float(grid[there[0]] / (share * total)) if there.size else None


def ratios(ours: Sequence[Lines], base: Sequence[Lines], shares: Sequence[float]) -> str:
    """The ratios at some shares of the run, as text."""
    found = [ratio(ours, base, share) for share in shares]
    return ", ".join("never" if each is None else f"{each:.2f}" for each in found)
