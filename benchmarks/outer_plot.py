"""Plot of the loss over virtual time in cells of `benchmarks.outer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from aladdin_mpi.comparison.plots import style
from benchmarks.outer_cells import Cell

TITLES = {
    "equal": "all workers equal",
    "slow 10": "one worker 10 times slower",
    "pauses": "random pauses",
}
Curves = Mapping[str, Sequence[Mapping[str, Any]]]
"""The figures of each seed by rule."""


def draw(panels: Mapping[Cell, Curves], path: Path) -> None:
    """Write a panel for each cell; without cells, write nothing."""
    if not panels:
        return
    figure = Figure(figsize=(5.4 * len(panels), 4.2), layout="constrained")
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (cell, curves) in zip(axes, panels.items(), strict=True):
        for name, seeds in curves.items():
            axis.plot(*_mean(seeds), label=name, markersize=3, **style(names.index(name)))
        axis.set_xscale("log")
        axis.set_title(f"{cell.workers} workers, {TITLES.get(cell.speeds, cell.speeds)}")
        axis.set_xlabel("time in steps of an ordinary worker")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("test loss, nats per character")
    axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=110, metadata={"Software": ""})


def _mean(seeds: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """Return times and losses, as means over the seeds at equal samples."""
    lines = list(zip(*(figures["curve"] for figures in seeds), strict=False))
    times = [sum(line["seconds"] for line in each) / len(each) for each in lines]
    return times, [
        sum(line["test_loss"] or float("nan") for line in each) / len(each) for each in lines
    ]
