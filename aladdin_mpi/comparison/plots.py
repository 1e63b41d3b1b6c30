"""Plots of a comparison: accuracy and variance against time and samples, and throughput."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aladdin_mpi.comparison.figures import Evaluation, RunFigures, TableRow, four_digits
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
GREY = "0.35"
LOG_RATIO = 5.0
"""From this ratio of the longest to the shortest run on, time is shown on a logarithmic axis."""
DPI = 110
Style = dict[str, Any]
"""``color``, ``linestyle`` and ``marker``."""
Line = tuple[Sequence[float], Sequence[float]]
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
    rows: Sequence[TableRow],
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
    # By the order of the command, so that a colour does not depend on the result.
    styles = {label: style(n) for n, label in enumerate(dict.fromkeys(run.label for run in runs))}
    looks = {row.label: styles[row.label] for row in rows}
    figures = {
        ACCURACY_TIME: _accuracy(runs, looks, "training time, s", _seconds, target),
        ACCURACY_SAMPLES: _accuracy(runs, looks, "samples", _samples, target),
        VARIANCE_SAMPLES: _variance(runs, looks),
        THROUGHPUT: _throughput(rows, looks, ideals),
    }
    drawn = {name: figure for name, figure in figures.items() if figure is not None}
    for name, figure in drawn.items():
        figure.axes[0].set_title(title, fontsize=10)
        save(figure, out / name)
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


def _accuracy(
    runs: Sequence[RunFigures],
    looks: Mapping[str, Style],
    x_label: str,
    x: Value,
    target: float | None,
) -> Any:
    curves = _curves(runs, looks, x, lambda evaluation: evaluation.accuracy)
    if not curves:
        return None
    ends = [curve.xs[-1] for curve in curves]
    is_log = x is _seconds and max(ends) > LOG_RATIO * max(min(ends), 1e-9)
    return _figure(curves, x_label, "test accuracy", x_is_log=is_log, mark=target)


def _variance(runs: Sequence[RunFigures], looks: Mapping[str, Style]) -> Any:
    curves = _curves(runs, looks, _samples, lambda evaluation: evaluation.model_variance)
    if not any(any(curve.ys) for curve in curves):
        return None
    return _figure(curves, "samples", "variance among the workers' models, relative", y_is_log=True)


def _seconds(evaluation: Evaluation) -> float:
    return evaluation.seconds


def _samples(evaluation: Evaluation) -> float:
    return float(evaluation.samples)


def save(figure: Any, path: Path) -> None:
    """Write a figure to a PNG file, whole or not at all."""
    with written_whole(path) as temporary:
        figure.savefig(temporary, dpi=DPI)


def _empty_figure(width: float, height: float) -> Any:
    """A figure of this size, in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), constrained_layout=True)
    FigureCanvasAgg(figure)
    return figure


# -- throughput -------------------------------------------------------------------------
HALF = 0.35
"""Of a bar's height, where bars are 1 apart."""
SMALL = 8


def _throughput(
    rows: Sequence[TableRow], looks: Mapping[str, Style], ideals: Mapping[str, float]
) -> Any:
    """Bars, the highest on top, with the standard deviations; None without any figure."""
    known = [row for row in rows if row.figures["samples_per_second"] is not None]
    if not known:
        return None
    ranked = sorted(known, key=lambda row: row.mean("samples_per_second") or 0.0)
    figure = _empty_figure(8.5, 1.5 + 0.34 * len(ranked))
    axis = figure.add_subplot()
    ends = [_bar(axis, place, row, looks[row.label]["color"]) for place, row in enumerate(ranked)]
    marks = {place: ideals[row.label] for place, row in enumerate(ranked) if row.label in ideals}
    for place, ideal in marks.items():
        axis.vlines(ideal, place - 0.5, place + 0.5, color=GREY, lw=1.4, ls=(0, (4, 2)))
    _label_bars(axis, ranked, bool(marks))
    axis.set_xlim(0, 1.04 * max([*ends, *marks.values(), 1e-9]))
    axis.xaxis.set_major_formatter("{x:,.10g}")
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    return figure


def _bar(axis: Any, place: int, row: TableRow, colour: str) -> float:
    """Draw a bar with its error bar; returns where it ends."""
    rate = row.figures["samples_per_second"]
    assert rate is not None
    axis.barh(place, rate.mean, color=colour, height=2 * HALF)
    if not rate.std:
        return rate.mean
    # Grey on white, which is seen on a bar of any colour.
    for width, line in ((3.4, "white"), (1.4, GREY)):
        thick = {"lw": width, "capsize": 4, "capthick": width}
        axis.errorbar(rate.mean, place, xerr=rate.std, color=line, **thick)
    return rate.mean + rate.std


def _label_bars(axis: Any, ranked: Sequence[TableRow], has_ideal: bool) -> None:
    """Names to the left, figures to the right, where neither bars nor lines run through them."""
    axis.set_yticks(range(len(ranked)), [row.label for row in ranked])
    axis.set_ylim(-0.6, len(ranked) - 0.4)
    beside = {"transform": axis.get_yaxis_transform(), "va": "center", "fontsize": SMALL}
    for place, row in enumerate(ranked):
        mean, speed_up = row.mean("samples_per_second") or 0.0, row.mean("speed_up")
        text = f"{mean:,.{four_digits(mean)}f}"
        text += "" if speed_up is None else f"  ({speed_up:.2f} x one worker)"
        axis.text(1.01, place, text, **beside)
    what = "throughput of all workers, samples/s"
    axis.set_xlabel(f"{what} (dashed: sum of the workers' own speeds)" if has_ideal else what)


# -- curves -----------------------------------------------------------------------------
HANDLE = 3.4
"""The length of a line in the legend, in sizes of its letters."""
POINTS_PER_INCH = 72.0


@dataclass(frozen=True)
class PlottedCurve:
    """A label's curve: its only run, or the mean of the runs in ``singles``."""

    label: str
    look: Style
    xs: Sequence[float]
    ys: Sequence[float]
    singles: Sequence[Line] = ()


def _curves(
    runs: Sequence[RunFigures], looks: Mapping[str, Style], x: Value, y: Value
) -> list[PlottedCurve]:
    """A curve for each label of whose runs some have both values."""
    curves = []
    for label, look in looks.items():
        lines = []
        for run in runs:
            pairs = [(x(each), y(each)) for each in run.evaluations if run.label == label]
            there = [(a, b) for a, b in pairs if a is not None and b is not None and isfinite(b)]
            if there:
                lines.append(([a for a, _ in there], [b for _, b in there]))
        if lines:
            curves.append(_mean_curve(label, look, lines))
    return curves


def _mean_curve(label: str, look: Style, lines: Sequence[Line]) -> PlottedCurve:
    """One run as it is; of several the mean, where all of them are."""
    if len(lines) == 1:
        return PlottedCurve(label, look, *lines[0])
    first, last = max(xs[0] for xs, _ in lines), min(xs[-1] for xs, _ in lines)
    inside = {value for xs, _ in lines for value in xs if first < value < last}
    grid = sorted(inside | {first, last})
    mean = np.mean([np.interp(grid, xs, ys) for xs, ys in lines], axis=0)
    return PlottedCurve(label, look, grid, mean.tolist(), lines)


def _figure(
    curves: Sequence[PlottedCurve],
    x_label: str,
    y_label: str,
    x_is_log: bool = False,
    y_is_log: bool = False,
    mark: float | None = None,
) -> Any:
    """The curves, a line at ``mark``, and a legend beside them in their order.

    On a logarithmic axis those that are 0 throughout have no curve, and the legend says so.
    """
    figure = _empty_figure(9.5, max(4.6, 1.2 + 0.24 * len(curves)))
    axis = figure.add_subplot(xlabel=x_label, ylabel=y_label)
    _scale(axis, x_is_log, y_is_log)
    shown = [curve for curve in curves if any(curve.ys) or not y_is_log]
    found = _parts_on(axis, shown)
    legend = {c.label: _draw_curve(axis, c, part) for c, part in zip(shown, found, strict=True)}
    legend |= {
        f"{curve.label}: 0": _legend_line(ls="none") for curve in curves if curve not in shown
    }
    if mark is not None:
        dashed = {"color": GREY, "lw": 1, "ls": (0, (6, 4)), "zorder": 1.5}
        legend[f"target {mark:g}"] = axis.axhline(mark, **dashed)
    if any(part.count > 1 for part in found):
        legend["dashes in turn:\nthey coincide"] = _legend_line(ls="none")
    place = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5)}
    axis.legend([*legend.values()], [*legend], frameon=False, handlelength=HANDLE, **place)
    return figure


def _scale(axis: Any, x_is_log: bool, y_is_log: bool) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.grid(alpha=0.3)
    if y_is_log:
        axis.set_yscale("log", nonpositive="mask")
    if x_is_log:
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.xaxis.set_minor_formatter(NullFormatter())
    axis.xaxis.set_major_formatter("{x:,.10g}")


def _draw_curve(axis: Any, curve: PlottedCurve, part: Part) -> Any:
    """The line, then its markers on top of all lines; returns what the legend shows."""
    colour = {"color": curve.look["color"]}
    line = curve.look["linestyle"]
    marker = {"marker": curve.look["marker"], "mec": "white", "mew": 0.5, **colour}
    thin = {"lw": THIN, "zorder": 1.9, **colour}
    if part.count > 1:
        axis.plot(curve.xs, curve.ys, **thin)
    axis.plot(curve.xs, curve.ys, **colour, **part.line(line))
    axis.plot(curve.xs, curve.ys, ls="none", **marker, **part.markers(len(curve.xs)))
    dash = min(DASH, HANDLE * _letter_points() / part.count)
    dashes = _legend_line(ms=MARKER, **marker, **part.line(line, dash))
    return dashes if part.count == 1 else (_legend_line(**thin), dashes)


def _legend_line(**look: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], **look)


def _letter_points() -> float:
    """The size of the legend's letters, in points."""
    from matplotlib import rcParams
    from matplotlib.font_manager import FontProperties

    return float(FontProperties(size=rcParams["legend.fontsize"]).get_size_in_points())


# -- curves that coincide -----------------------------------------------------------------
CurvePath = npt.NDArray[np.float64]
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
        turns = min(self.count, -(-points // every))
        layer, turn = divmod(self.place, turns)
        return {
            "markevery": slice(every * turn, None, every * turns),
            "ms": MARKER + LARGER * layer,
            "zorder": 3 - 0.01 * layer,
        }


def _parts_on(axis: Any, curves: Sequence[PlottedCurve]) -> list[Part]:
    """How the curves share the way where they coincide, as far as can be seen on these axes."""
    for curve in curves:
        thin = {"lw": 0.7, "alpha": 0.35 if curve.singles else 0.0, "color": curve.look["color"]}
        for xs, ys in [*curve.singles, (curve.xs, curve.ys)]:
            axis.plot(xs, ys, **thin)
    axis.get_xlim()  # brings the transform up to date with what has been drawn
    scale = POINTS_PER_INCH / axis.figure.dpi
    with np.errstate(divide="ignore", invalid="ignore"):
        places = [np.column_stack([curve.xs, curve.ys]).astype(float) for curve in curves]
        return parts([scale * axis.transData.transform(place) for place in places])


def parts(paths: Sequence[CurvePath]) -> list[Part]:
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


def _along(path: CurvePath) -> CurvePath:
    """Places at equal distances along a curve."""
    path = path[np.isfinite(path).all(axis=1)]
    way = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(path, axis=0).T))])
    places = np.linspace(0.0, way[-1], SAMPLES)
    return np.stack([np.interp(places, way, path[:, axis]) for axis in (0, 1)], axis=1)


def _coincide(one: CurvePath, other: CurvePath) -> bool:
    distances = np.hypot(*(one[:, None] - other[None]).transpose(2, 0, 1))
    return all((distances.min(axis=axis) <= NEAR).mean() >= SHARE for axis in (0, 1))
