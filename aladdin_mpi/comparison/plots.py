"""A comparison for the eye: accuracy against time and samples, and throughput."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aladdin_mpi import units
from aladdin_mpi.comparison.figures import Evaluation, Row, RunFigures

ACCURACY_TIME = "accuracy-time.png"
ACCURACY_SAMPLES = "accuracy-samples.png"
VARIANCE_SAMPLES = "variance-samples.png"
THROUGHPUT = "throughput.png"
COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#e69f00", "#56b4e9", "#8c564b",
)  # fmt: skip
"""Okabe and Ito's, which colour-blind readers can tell apart; brown in the place of yellow."""
STYLES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D")
LOG_RATIO = 20.0
"""From this ratio of the longest to the shortest run on, time is shown on a logarithmic axis."""
DPI = 110
BEHIND_TEXT = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.6}
Style = dict[str, Any]
Value = Callable[[Evaluation], float]


def draw(
    runs: Sequence[RunFigures],
    rows: Sequence[Row],
    out: Path,
    title: str,
    target: float | None,
    ideal: float | None,
) -> list[str]:
    """Draw what there are figures for; returns the names of the files.

    Args:
        runs: all runs.
        rows: the table, in its order, which is that of the legend.
        out: the folder for the files.
        title: a line above each figure.
        target: an accuracy to mark.
        ideal: the throughput that all workers together would have without any loss.
    """
    # By the order of the command, so that a colour does not depend on who wins.
    colours = {
        label: style(place) for place, label in enumerate(dict.fromkeys(r.label for r in runs))
    }
    styles = {row.label: colours[row.label] for row in rows}
    names = []
    if any(run.evaluations for run in runs):
        for name, x, label in (
            (ACCURACY_TIME, _seconds, "training time, s"),
            (ACCURACY_SAMPLES, _samples, "samples"),
        ):
            figure = _curves(runs, styles, x, _accuracy, title)
            axis = figure.axes[0]
            if target is not None:
                grey = {"color": "grey", "lw": 1, "ls": (0, (6, 4))}
                axis.axhline(target, label=f"target {target:g}", **grey)
            _label(axis, label, "test accuracy")
            longest = [run.evaluations[-1].seconds for run in runs if run.evaluations]
            if x is _seconds and max(longest) > LOG_RATIO * max(min(longest), 1e-9):
                axis.set_xscale("log")
            _save(figure, out / name)
            names.append(name)
    if any(e.model_variance for run in runs for e in run.evaluations):
        figure = _curves(runs, styles, _samples, _variance, title)
        _label(figure.axes[0], "samples", "variance among the workers' models")
        # Those whose workers are the same have 0, and no curve.
        figure.axes[0].set_yscale("log", nonpositive="mask")
        _save(figure, out / VARIANCE_SAMPLES)
        names.append(VARIANCE_SAMPLES)
    _save(_bars(rows, styles, title, ideal), out / THROUGHPUT)
    return [*names, THROUGHPUT]


def style(place: int) -> Style:
    """Colour, line and marker of the algorithm in this place; 32 differ."""
    turn = place // len(COLOURS)
    return {
        "color": COLOURS[place % len(COLOURS)],
        "linestyle": STYLES[turn % len(STYLES)],
        "marker": MARKERS[turn % len(MARKERS)],
    }


def _seconds(evaluation: Evaluation) -> float:
    return evaluation.seconds


def _samples(evaluation: Evaluation) -> float:
    return float(evaluation.samples)


def _accuracy(evaluation: Evaluation) -> float:
    return evaluation.accuracy


def _variance(evaluation: Evaluation) -> float:
    return math.nan if evaluation.model_variance is None else evaluation.model_variance


def _label(axis: Any, x: str, y: str) -> None:
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, handlelength=3.2)


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), constrained_layout=True)
    FigureCanvasAgg(figure)
    return figure


def _curves(
    runs: Sequence[RunFigures],
    styles: dict[str, Style],
    x: Value,
    y: Value,
    title: str,
) -> Any:
    figure = _figure(9.5, max(4.6, 1.2 + 0.24 * len(styles)))
    axis = figure.add_subplot()
    for label, look in styles.items():
        curves = [run.evaluations for run in runs if run.label == label and run.evaluations]
        if curves:
            _curve(axis, curves, (x, y), label, look)
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3)
    return figure


def _curve(
    axis: Any,
    curves: Sequence[Sequence[Evaluation]],
    values: tuple[Value, Value],
    label: str,
    look: Style,
) -> None:
    """One run as it is; several as thin lines, with their mean where all of them are."""
    x, y = values
    points = [([x(e) for e in curve], [y(e) for e in curve]) for curve in curves]
    if len(points) > 1:
        for xs, ys in points:
            axis.plot(xs, ys, color=look["color"], lw=0.7, alpha=0.35)
        first, last = max(xs[0] for xs, _ in points), min(xs[-1] for xs, _ in points)
        inside = {value for xs, _ in points for value in xs if first < value < last}
        grid = sorted(inside | {first, last})
        mean = np.mean([np.interp(grid, xs, ys) for xs, ys in points], axis=0)
        axis.plot(grid, mean, label=label, lw=1.8, **{**look, "marker": None})
        return
    xs, ys = points[0]
    every = max(1, len(xs) // 15)
    axis.plot(xs, ys, label=label, lw=1.6, ms=3.5, markevery=every, **look)


def _bars(rows: Sequence[Row], styles: dict[str, Style], title: str, ideal: float | None) -> Any:
    """Throughput, the highest on top, with the standard deviation over the runs."""
    ranked = sorted(rows, key=lambda row: row.mean("samples_per_second") or 0.0)
    figure = _figure(8.5, 1.5 + 0.34 * len(ranked))
    axis = figure.add_subplot()
    for place, row in enumerate(ranked):
        found = row.figures["samples_per_second"]
        if found is None:
            continue
        axis.barh(place, found.mean, xerr=found.std, color=styles[row.label]["color"], height=0.7)
        speed_up = row.mean("speed_up")
        text = f" {units.number(found.mean)}"
        text += "" if speed_up is None else f"  ({speed_up:.2f} x one worker)"
        edge = found.mean + (found.std or 0.0)
        axis.text(edge, place, text, va="center", fontsize=8, bbox=BEHIND_TEXT)
    if ideal is not None:
        axis.axvline(ideal, color="grey", lw=1, ls=(0, (6, 4)), zorder=1.5)
        axis.text(ideal, len(ranked) - 0.45, "all workers without loss ", ha="right", fontsize=8)
    axis.set_yticks(range(len(ranked)), [row.label for row in ranked])
    axis.set_ylim(-0.6, len(ranked) - 0.1)
    # Room for the figures beside the bars.
    highest = max(row.mean("samples_per_second") or 0.0 for row in rows)
    axis.set_xlim(0, max(1.45 * highest, 1.05 * (ideal or 0.0), 1e-9))
    axis.set_xlabel("throughput of all workers, samples/s")
    axis.set_title(title, fontsize=10)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    return figure


def _save(figure: Any, path: Path) -> None:
    temporary = path.with_name(path.stem + ".tmp.png")
    figure.savefig(temporary, dpi=DPI)
    temporary.replace(path)
