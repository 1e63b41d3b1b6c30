"""Plot accuracy over time in every part of `benchmarks.convergence`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from aladdin_mpi.comparison.plots import style
from benchmarks.learning.evaluations import Runs

ACROSS = 2
COLOURS = 128


def draw(panels: Mapping[str, Mapping[str, Runs]], target: float, path: Path) -> None:
    """Write the figure.

    Args:
        panels: the runs of each label, by title.
        target: an accuracy from 0 to 1 to mark.
        path: path of the file.
    """
    down = -(-len(panels) // ACROSS)
    across = min(ACROSS, len(panels))
    figure = Figure(figsize=(6.2 * across, 3.9 * down), layout="constrained")
    looks = {name: style(i) for i, name in enumerate(dict.fromkeys(_labels(panels)))}
    for place, (title, runs) in enumerate(panels.items(), start=1):
        axis = figure.add_subplot(down, across, place)
        _panel(axis, runs, looks)
        axis.axhline(100 * target, color="0.5", linewidth=0.8, linestyle=":")
        axis.set_title(title, fontsize=10)
    figure.savefig(path, dpi=110, metadata={"Software": ""})
    # A quarter of the file size: a few colours are enough for lines.
    Image.open(path).convert("P", palette=Image.Palette.ADAPTIVE, colors=COLOURS).save(
        path, optimize=True
    )


def _labels(panels: Mapping[str, Mapping[str, Runs]]) -> list[str]:
    return [label for runs in panels.values() for label in runs]


def _panel(axis: Axes, runs: Mapping[str, Runs], looks: Mapping[str, Mapping[str, Any]]) -> None:
    for label, seeds in runs.items():
        for turn, lines in enumerate(seeds):
            axis.plot(
                [line["seconds"] for line in lines],
                [100 * line["test_accuracy"] for line in lines],
                label=None if turn else label,
                markersize=3,
                linewidth=1.2,
                **looks[label],
            )
    axis.set_xlabel("time of the modelled cluster, s")
    axis.set_ylabel("test accuracy, %")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7, ncols=2 if len(runs) > 6 else 1, loc="lower right")
