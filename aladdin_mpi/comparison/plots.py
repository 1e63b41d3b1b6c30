"""A comparison for the eye: accuracy and variance against time and samples, and throughput."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from aladdin_mpi.comparison import curves
from aladdin_mpi.comparison.bars import throughput
from aladdin_mpi.comparison.curves import Curve, Style, mean_curve
from aladdin_mpi.comparison.figures import Evaluation, Row, RunFigures
from aladdin_mpi.process import extras
from aladdin_mpi.process.files import written_whole

ACCURACY_TIME = "accuracy-time.png"
ACCURACY_SAMPLES = "accuracy-samples.png"
VARIANCE_SAMPLES = "variance-samples.png"
THROUGHPUT = "throughput.png"
COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#e69f00", "#56b4e9", "#8c564b",
)  # fmt: skip
"""Okabe and Ito's, which colour-blind readers can tell apart; brown in the place of yellow."""
STYLES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "X", "P", "<")
LOG_RATIO = 5.0
"""From this ratio of the longest to the shortest run on, time is shown on a logarithmic axis."""
DPI = 110
Value = Callable[[Evaluation], float | None]


def not_drawn() -> list[str]:
    """A line that says why there are no plots; empty if there are."""
    if not extras.missing("matplotlib"):
        return []
    return [
        f"No plots: matplotlib is not installed; {extras.command(['matplotlib'])}, and the same "
        "command draws them."
    ]


def draw(
    runs: Sequence[RunFigures],
    rows: Sequence[Row],
    out: Path,
    title: str,
    target: float | None,
    ideals: Mapping[str, float],
) -> list[str]:
    """Draw what there are figures for; returns the names of the files.

    Without matplotlib there are none.

    Args:
        runs: all runs.
        rows: the table, in its order, which is that of the legend.
        out: the folder for the files.
        title: a line above each figure.
        target: an accuracy to mark.
        ideals: by label the throughput that all workers together would have without any loss.
    """
    if not_drawn():
        return []
    looks = _looks(runs, rows)
    colours = {label: look["color"] for label, look in looks.items()}
    figures = {
        ACCURACY_TIME: _accuracy(runs, looks, "training time, s", _seconds, target),
        ACCURACY_SAMPLES: _accuracy(runs, looks, "samples", _samples, target),
        VARIANCE_SAMPLES: _variance(runs, looks),
        THROUGHPUT: throughput(rows, colours, ideals),
    }
    drawn = {name: figure for name, figure in figures.items() if figure is not None}
    for name, figure in drawn.items():
        figure.axes[0].set_title(title, fontsize=10)
        _save(figure, out / name)
    return list(drawn)


def style(place: int) -> Style:
    """Colour, line and marker of the algorithm in this place; 32 differ, also without colour."""
    turn = place // len(COLOURS)
    return {
        "color": COLOURS[place % len(COLOURS)],
        "linestyle": STYLES[turn % len(STYLES)],
        # Another one in the next turn, so that a colour does not come with the same marker.
        "marker": MARKERS[(place + 3 * turn) % len(MARKERS)],
    }


def _looks(runs: Iterable[RunFigures], rows: Iterable[Row]) -> dict[str, Style]:
    """By the order of the command, so that a colour does not depend on who wins."""
    labels = dict.fromkeys(run.label for run in runs)
    styles = {label: style(place) for place, label in enumerate(labels)}
    return {row.label: styles[row.label] for row in rows}


def _accuracy(
    runs: Sequence[RunFigures],
    looks: Mapping[str, Style],
    x_label: str,
    x: Value,
    target: float | None,
) -> Any:
    found = _curves(runs, looks, x, lambda evaluation: evaluation.accuracy)
    if not found:
        return None
    longest = [curve.xs[-1] for curve in found]
    is_log = x is _seconds and max(longest) > LOG_RATIO * max(min(longest), 1e-9)
    axes = curves.Axes(x_label, "test accuracy", x_is_log=is_log, mark=target)
    return curves.figure(found, axes)


def _variance(runs: Sequence[RunFigures], looks: Mapping[str, Style]) -> Any:
    found = _curves(runs, looks, _samples, lambda evaluation: evaluation.model_variance)
    if not any(any(curve.ys) for curve in found):
        return None
    label = "variance among the workers' models, relative"
    return curves.figure(found, curves.Axes("samples", label, y_is_log=True))


def _curves(
    runs: Sequence[RunFigures], looks: Mapping[str, Style], x: Value, y: Value
) -> list[Curve]:
    """Of each label its runs, where they have both values."""
    found = []
    for label, look in looks.items():
        lines = []
        for run in runs:
            pairs = [(x(each), y(each)) for each in run.evaluations if run.label == label]
            there = [(a, b) for a, b in pairs if a is not None and b is not None and isfinite(b)]
            if there:
                lines.append(([a for a, _ in there], [b for _, b in there]))
        if lines:
            found.append(mean_curve(label, look, lines))
    return found


def _seconds(evaluation: Evaluation) -> float:
    return evaluation.seconds


def _samples(evaluation: Evaluation) -> float:
    return float(evaluation.samples)


def _save(figure: Any, path: Path) -> None:
    with written_whole(path) as temporary:
        figure.savefig(temporary, dpi=DPI)
