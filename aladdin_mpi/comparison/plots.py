"""Plots of a comparison: accuracy or loss, and variance, against time and samples; throughput."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aladdin_mpi.comparison.figures import (
    Evaluation,
    Measure,
    RunFigures,
    TableRow,
    Target,
    compared_measure,
    four_digits,
)
from aladdin_mpi.process import extras
from aladdin_mpi.process.files import written_whole

MEASURE_TIME = "{}-time.png"
MEASURE_SAMPLES = "{}-samples.png"
VARIANCE_SAMPLES = "variance-samples.png"
THROUGHPUT = "throughput.png"
COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#e69f00", "#56b4e9", "#8c564b",
)  # fmt: skip
"""Okabe and Ito's palette for colour-blind readers, with brown instead of yellow."""
STYLES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "X", "P", "<")
GREY = "0.35"
LOG_RATIO = 5.0
"""Ratio of the longest to the shortest run above which the time axis is logarithmic."""
DPI = 110
Style = dict[str, Any]
"""``color``, ``linestyle`` and ``marker``."""
Line = tuple[Sequence[float], Sequence[float]]
Value = Callable[[Evaluation], float | None]


def not_drawn() -> list[str]:
    """Return a line on missing plots if matplotlib is not installed; else an empty list."""
    if not extras.missing("matplotlib"):
        return []
    return [
        f"No plots: matplotlib is not installed. To draw them, {extras.command(['matplotlib'])} "
        "and rerun the command."
    ]


def draw(
    runs: Sequence[RunFigures],
    rows: Sequence[TableRow],
    out: Path,
    title: str,
    target: Target | None,
    ideals: Mapping[str, float],
) -> list[str]:
    """Draw the plots with data and return the names of their files; none without matplotlib.

    Args:
        runs: all runs.
        rows: the rows of the table, whose order is that of the legend.
        out: the folder for the files.
        title: the title of each plot.
        target: a value to mark.
        ideals: ideal throughput of all workers by label.
    """
    if not_drawn():
        return []
    # In the order of the command, so that colours do not depend on the results.
    styles = {label: style(n) for n, label in enumerate(dict.fromkeys(run.label for run in runs))}
    styles = {row.label: styles[row.label] for row in rows}
    measure = compared_measure(runs, target)
    name, mark = measure.name, None if target is None else target.value
    figures = {
        MEASURE_TIME.format(name): _learning(runs, styles, measure, _seconds, mark),
        MEASURE_SAMPLES.format(name): _learning(runs, styles, measure, _samples, mark),
        VARIANCE_SAMPLES: _variance(runs, styles),
        THROUGHPUT: _throughput(rows, styles, ideals),
    }
    drawn = {name: figure for name, figure in figures.items() if figure is not None}
    for name, figure in drawn.items():
        figure.axes[0].set_title(title, fontsize=10)
        save(figure, out / name)
    return list(drawn)


def style(place: int) -> Style:
    """Return colour, line and marker of the algorithm at this place; 32 are distinct."""
    turn = place // len(COLOURS)
    return {
        "color": COLOURS[place % len(COLOURS)],
        "linestyle": STYLES[turn % len(STYLES)],
        # Shifted in the next turn, so that a colour is not repeated with the same marker.
        "marker": MARKERS[(place + 3 * turn) % len(MARKERS)],
    }


def _learning(
    runs: Sequence[RunFigures],
    styles: Mapping[str, Style],
    measure: Measure,
    x: Value,
    mark: float | None,
) -> Any:
    curves = _curves(runs, styles, x, measure.of)
    if not curves:
        return None
    ends = [curve.xs[-1] for curve in curves]
    is_log = x is _seconds and max(ends) > LOG_RATIO * max(min(ends), 1e-9)
    x_label = "training time (s)" if x is _seconds else "samples"
    return _figure(curves, x_label, f"test {measure.name}", x_is_log=is_log, mark=mark)


def _variance(runs: Sequence[RunFigures], styles: Mapping[str, Style]) -> Any:
    curves = _curves(runs, styles, _samples, lambda evaluation: evaluation.model_variance)
    if not any(any(curve.ys) for curve in curves):
        return None
    return _figure(curves, "samples", "relative variance among workers' models", y_is_log=True)


def _seconds(evaluation: Evaluation) -> float:
    return evaluation.seconds


def _samples(evaluation: Evaluation) -> float:
    return float(evaluation.samples)


def save(figure: Any, path: Path) -> None:
    """Write a figure to a PNG file atomically."""
    with written_whole(path) as temporary:
        figure.savefig(temporary, dpi=DPI)


def _empty_figure(width: float, height: float) -> Any:
    """Return a figure of this size in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), constrained_layout=True)
    FigureCanvasAgg(figure)
    return figure


# -- throughput -------------------------------------------------------------------------
HALF = 0.35
"""Half of a bar's height, relative to the distance of bars."""
SMALL = 8


def _throughput(
    rows: Sequence[TableRow], styles: Mapping[str, Style], ideals: Mapping[str, float]
) -> Any:
    """Return a bar chart with standard deviations, the highest on top; None without data."""
    known = [row for row in rows if row.figures["samples_per_second"] is not None]
    if not known:
        return None
    ranked = sorted(known, key=lambda row: row.mean("samples_per_second") or 0.0)
    figure = _empty_figure(8.5, 1.5 + 0.34 * len(ranked))
    axis = figure.add_subplot()
    ends = [_bar(axis, place, row, styles[row.label]["color"]) for place, row in enumerate(ranked)]
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
    """Draw a bar with its error bar and return its end."""
    rate = row.figures["samples_per_second"]
    assert rate is not None
    axis.barh(place, rate.mean, color=colour, height=2 * HALF)
    if not rate.std:
        return rate.mean
    # Grey on white is visible on bars of any colour.
    for width, line in ((3.4, "white"), (1.4, GREY)):
        thick = {"lw": width, "capsize": 4, "capthick": width}
        axis.errorbar(rate.mean, place, xerr=rate.std, color=line, **thick)
    return rate.mean + rate.std


def _label_bars(axis: Any, ranked: Sequence[TableRow], has_ideal: bool) -> None:
    """Label bars with names on the left and figures on the right, outside the axes."""
    axis.set_yticks(range(len(ranked)), [row.label for row in ranked])
    axis.set_ylim(-0.6, len(ranked) - 0.4)
    style = {"transform": axis.get_yaxis_transform(), "va": "center", "fontsize": SMALL}
    for place, row in enumerate(ranked):
        mean, speed_up = row.mean("samples_per_second") or 0.0, row.mean("speed_up")
        text = f"{mean:,.{four_digits(mean)}f}"
        text += "" if speed_up is None else f"  (speedup {speed_up:.2f})"
        axis.text(1.01, place, text, **style)
    label = "throughput (samples/s)"
    axis.set_xlabel(f"{label}; dashed: ideal" if has_ideal else label)


# -- curves -----------------------------------------------------------------------------
HANDLE = 3.4
"""Length of a line in the legend, relative to the font size."""
POINTS_PER_INCH = 72.0


@dataclass(frozen=True)
class PlottedCurve:
    """The curve of a label: that of its only run, or the mean of the runs in ``singles``."""

    label: str
    style: Style
    xs: Sequence[float]
    ys: Sequence[float]
    singles: Sequence[Line] = ()


def _curves(
    runs: Sequence[RunFigures], styles: Mapping[str, Style], x: Value, y: Value
) -> list[PlottedCurve]:
    """Return a curve for each label whose runs have both values."""
    curves = []
    for label, style in styles.items():
        lines = []
        for run in runs:
            pairs = [(x(each), y(each)) for each in run.evaluations if run.label == label]
            known = [(a, b) for a, b in pairs if a is not None and b is not None and isfinite(b)]
            if known:
                lines.append(([a for a, _ in known], [b for _, b in known]))
        if lines:
            curves.append(_mean_curve(label, style, lines))
    return curves


def _mean_curve(label: str, style: Style, lines: Sequence[Line]) -> PlottedCurve:
    """Return the curve of one run, or the mean of several over their common range."""
    if len(lines) == 1:
        return PlottedCurve(label, style, *lines[0])
    first, last = max(xs[0] for xs, _ in lines), min(xs[-1] for xs, _ in lines)
    inside = {value for xs, _ in lines for value in xs if first < value < last}
    grid = sorted(inside | {first, last})
    mean = np.mean([np.interp(grid, xs, ys) for xs, ys in lines], axis=0)
    return PlottedCurve(label, style, grid, mean.tolist(), lines)


def _figure(
    curves: Sequence[PlottedCurve],
    x_label: str,
    y_label: str,
    x_is_log: bool = False,
    y_is_log: bool = False,
    mark: float | None = None,
) -> Any:
    """Return a figure with the curves, a line at ``mark``, and a legend in the same order.

    On a logarithmic axis, curves that are 0 throughout appear only in the legend.
    """
    figure = _empty_figure(9.5, max(4.6, 1.2 + 0.24 * len(curves)))
    axis = figure.add_subplot(xlabel=x_label, ylabel=y_label)
    _scale(axis, x_is_log, y_is_log)
    shown = [curve for curve in curves if any(curve.ys) or not y_is_log]
    shares = _parts_on(axis, shown)
    legend = {c.label: _draw_curve(axis, c, part) for c, part in zip(shown, shares, strict=True)}
    legend |= {
        f"{curve.label}: 0": _legend_line(ls="none") for curve in curves if curve not in shown
    }
    if mark is not None:
        dashed = {"color": GREY, "lw": 1, "ls": (0, (6, 4)), "zorder": 1.5}
        legend[f"target {mark:g}"] = axis.axhline(mark, **dashed)
    if any(part.count > 1 for part in shares):
        legend["alternating dashes:\ncurves coincide"] = _legend_line(ls="none")
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
    """Draw the line and its markers, and return the handle for the legend."""
    colour = {"color": curve.style["color"]}
    line = curve.style["linestyle"]
    marker = {"marker": curve.style["marker"], "mec": "white", "mew": 0.5, **colour}
    thin = {"lw": THIN, "zorder": 1.9, **colour}
    if part.count > 1:
        axis.plot(curve.xs, curve.ys, **thin)
    axis.plot(curve.xs, curve.ys, **colour, **part.line(line))
    axis.plot(curve.xs, curve.ys, ls="none", **marker, **part.markers(len(curve.xs)))
    dash = min(DASH, HANDLE * _letter_points() / part.count)
    dashes = _legend_line(ms=MARKER, **marker, **part.line(line, dash))
    return dashes if part.count == 1 else (_legend_line(**thin), dashes)


def _legend_line(**options: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], **options)


def _letter_points() -> float:
    """Return the font size of the legend, in points."""
    from matplotlib import rcParams
    from matplotlib.font_manager import FontProperties

    return float(FontProperties(size=rcParams["legend.fontsize"]).get_size_in_points())


# -- curves that coincide -----------------------------------------------------------------
CurvePath = npt.NDArray[np.float64]
"""A curve on the page, of shape (points, 2), in units of 1/72 inch."""
NEAR = 2.0
"""Distance below which two curves coincide, about a line's width, in points."""
SHARE = 0.5
"""Share of the length on which two curves must coincide to be drawn as one."""
SAMPLES = 400
"""Number of points at which curves are compared."""
DASH = 8.0
WIDTH = 1.6
WIDTHS = (2.6, 1.4)
"""Line widths of a single curve, and alternating ones of coinciding curves, in points."""
THIN = 0.7
MARKER = 6.0
LARGER = 5.0
"""Size of a marker, and the increment of each further one at the same point."""
MOST_MARKERS = 15


@dataclass(frozen=True)
class Part:
    """A curve's share in drawing coinciding curves: number ``place`` of ``count``."""

    place: int = 0
    count: int = 1

    @property
    def width(self) -> float:
        """The line width."""
        return WIDTH if self.count == 1 else WIDTHS[self.place % len(WIDTHS)]

    def line(self, style: str, dash: float = DASH) -> dict[str, Any]:
        """Return the style of the line; ``style`` if the curve is single."""
        # Wide lines are below narrow ones.
        options: dict[str, Any] = {"lw": self.width, "zorder": 2 + 0.1 * (self.place % len(WIDTHS))}
        if self.count == 1:
            return {**options, "ls": style}
        on, off = dash, dash * (self.count - 1)
        start = dash * (self.count - self.place)
        # matplotlib scales the lengths of dashes by the line width.
        lengths = [length / self.width for length in (start, on, off)]
        return {**options, "ls": (lengths[0], tuple(lengths[1:])), "dash_capstyle": "butt"}

    def markers(self, points: int) -> dict[str, Any]:
        """Return which points are marked, and the size of markers."""
        every = max(1, points // MOST_MARKERS)
        turns = min(self.count, -(-points // every))
        layer, turn = divmod(self.place, turns)
        return {
            "markevery": slice(every * turn, None, every * turns),
            "ms": MARKER + LARGER * layer,
            "zorder": 3 - 0.01 * layer,
        }


def _parts_on(axis: Any, curves: Sequence[PlottedCurve]) -> list[Part]:
    """Return the curves' shares in drawing those that coincide on these axes."""
    for curve in curves:
        thin = {"lw": 0.7, "alpha": 0.35 if curve.singles else 0.0, "color": curve.style["color"]}
        for xs, ys in [*curve.singles, (curve.xs, curve.ys)]:
            axis.plot(xs, ys, **thin)
    axis.get_xlim()  # updates the transform
    scale = POINTS_PER_INCH / axis.figure.dpi
    with np.errstate(divide="ignore", invalid="ignore"):
        places = [np.column_stack([curve.xs, curve.ys]).astype(float) for curve in curves]
        return parts([scale * axis.transData.transform(place) for place in places])


def parts(paths: Sequence[CurvePath]) -> list[Part]:
    """Return each curve's part among those that coincide."""
    samples = [_along(path) for path in paths]
    groups: list[list[int]] = []
    for number, path in enumerate(samples):
        for group in groups:
            if all(_coincide(path, samples[other]) for other in group):
                group.append(number)
                break
        else:
            groups.append([number])
    shares = {n: Part(place, len(group)) for group in groups for place, n in enumerate(group)}
    return [shares[number] for number in range(len(samples))]


def _along(path: CurvePath) -> CurvePath:
    """Return points at equal distances along a curve."""
    path = path[np.isfinite(path).all(axis=1)]
    way = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(path, axis=0).T))])
    places = np.linspace(0.0, way[-1], SAMPLES)
    return np.stack([np.interp(places, way, path[:, axis]) for axis in (0, 1)], axis=1)


def _coincide(one: CurvePath, other: CurvePath) -> bool:
    distances = np.hypot(*(one[:, None] - other[None]).transpose(2, 0, 1))
    return all((distances.min(axis=axis) <= NEAR).mean() >= SHARE for axis in (0, 1))
