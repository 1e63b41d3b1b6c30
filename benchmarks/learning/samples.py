"""Compare the samples that runs need to reach the same training loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Lines = Sequence[Mapping[str, Any]]
POINTS = 400
"""Number of points of a mean curve."""


def curve(runs: Sequence[Lines], grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean over the seeds of the loss at each of ``grid``'s samples.

    A line's loss is the mean since the previous line and is placed in the middle between the two;
    values between these points are interpolated linearly.
    """
    curves = []
    for run in runs:
        stops = np.array([0.0] + [line["samples"] for line in run])
        losses = np.array([line["loss"] for line in run])
        curves.append(np.interp(grid, (stops[1:] + stops[:-1]) / 2, losses))
    return np.asarray(np.mean(curves, axis=0))


def ratio(ours: Sequence[Lines], base: Sequence[Lines], share: float) -> float | None:
    """Return the ratio of ``ours``'s samples to ``base``'s, to base's loss after ``share`` of them.

    None if ours never reaches that loss.
    """
    total = base[0][-1]["samples"]
    grid = np.linspace(0, total, POINTS + 1)
    loss = curve(base, np.array([share * total]))[0]
    there = np.flatnonzero(curve(ours, grid) <= loss)
    return float(grid[there[0]] / (share * total)) if there.size else None


def ratios(ours: Sequence[Lines], base: Sequence[Lines], shares: Sequence[float]) -> str:
    """Return the ratios at some shares of the run, as text."""
    found = [ratio(ours, base, share) for share in shares]
    return ", ".join("never" if each is None else f"{each:.2f}" for each in found)
