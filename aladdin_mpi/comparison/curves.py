"""Curves of several algorithms in one figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aladdin_mpi.comparison.coinciding import DASH, MARKER, THIN, Part, parts

Style = dict[str, Any]
"""``color``, ``linestyle`` and ``marker``."""
Line = tuple[Sequence[float], Sequence[float]]
HANDLE = 3.4
"""The length of a line in the legend, in sizes of its letters."""
POINTS_PER_INCH = 72.0
GREY = "0.35"


@dataclass(frozen=True)
class Curve:
    """What is drawn for a label."""

    label: str
    look: Style
    xs: Sequence[float]
    ys: Sequence[float]
    singles: Sequence[Line] = ()
    """The runs of which this is the mean."""


@dataclass(frozen=True)
class Axes:
    """What the axes are."""

    x: str
    y: str
    x_is_log: bool = False
    y_is_log: bool = False
    mark: float | None = None
    """A value to draw a line at: the target."""


def mean_curve(label: str, look: Style, lines: Sequence[Line]) -> Curve:
    """One run as it is; of several the mean, where all of them are."""
    if len(lines) == 1:
        return Curve(label, look, *lines[0])
    first, last = max(xs[0] for xs, _ in lines), min(xs[-1] for xs, _ in lines)
    inside = {value for xs, _ in lines for value in xs if first < value < last}
    grid = sorted(inside | {first, last})
    mean = np.mean([np.interp(grid, xs, ys) for xs, ys in lines], axis=0)
    return Curve(label, look, grid, mean.tolist(), lines)


def empty_figure(width: float, height: float) -> Any:
    """A figure of this size, in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), constrained_layout=True)
    FigureCanvasAgg(figure)
    return figure


def figure(curves: Sequence[Curve], axes: Axes) -> Any:
    """The curves, and a legend beside them in their order.

    On a logarithmic axis those that are 0 throughout have no curve, and the legend says so.
    """
    drawn = empty_figure(9.5, max(4.6, 1.2 + 0.24 * len(curves)))
    axis = drawn.add_subplot()
    _scale(axis, axes)
    shown = [curve for curve in curves if any(curve.ys) or not axes.y_is_log]
    found = _parts(axis, shown)
    legend = {c.label: _draw(axis, c, part) for c, part in zip(shown, found, strict=True)}
    legend |= {f"{curve.label}: 0": _no_line() for curve in curves if curve not in shown}
    if axes.mark is not None:
        dashed = {"color": GREY, "lw": 1, "ls": (0, (6, 4)), "zorder": 1.5}
        legend[f"target {axes.mark:g}"] = axis.axhline(axes.mark, **dashed)
    if any(part.count > 1 for part in found):
        legend["dashes in turn:\nthey coincide"] = _no_line()
    place = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5)}
    axis.legend([*legend.values()], [*legend], frameon=False, handlelength=HANDLE, **place)
    return drawn


def _scale(axis: Any, axes: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_xlabel(axes.x)
    axis.set_ylabel(axes.y)
    axis.grid(alpha=0.3)
    if axes.y_is_log:
        axis.set_yscale("log", nonpositive="mask")
    if axes.x_is_log:
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.xaxis.set_minor_formatter(NullFormatter())
    axis.xaxis.set_major_formatter("{x:,.10g}")


def _parts(axis: Any, curves: Sequence[Curve]) -> list[Part]:
    """How the curves share the way where they coincide, as far as can be seen on these axes."""
    for curve in curves:
        for xs, ys in [*curve.singles, (curve.xs, curve.ys)]:
            thin = {"lw": 0.7, "alpha": 0.35 if curve.singles else 0.0}
            axis.plot(xs, ys, color=curve.look["color"], **thin)
    axis.get_xlim()  # brings the transform up to date with what has been drawn
    scale = POINTS_PER_INCH / axis.figure.dpi
    with np.errstate(divide="ignore", invalid="ignore"):
        places = [np.column_stack([curve.xs, curve.ys]).astype(float) for curve in curves]
        return parts([scale * axis.transData.transform(place) for place in places])


def _draw(axis: Any, curve: Curve, part: Part) -> Any:
    """The line, then its markers on top of all lines; returns what the legend shows."""
    from matplotlib.lines import Line2D

    colour = {"color": curve.look["color"]}
    style = curve.look["linestyle"]
    marker = {"marker": curve.look["marker"], "mec": "white", "mew": 0.5, **colour}
    thin = {"lw": THIN, "zorder": 1.9, **colour}
    if part.count > 1:
        axis.plot(curve.xs, curve.ys, **thin)
    axis.plot(curve.xs, curve.ys, **colour, **part.line(style))
    axis.plot(curve.xs, curve.ys, ls="none", **marker, **part.markers(len(curve.xs)))
    whole = HANDLE * _letters()
    dashes = Line2D([], [], ms=MARKER, **marker, **part.line(style, min(DASH, whole / part.count)))
    return dashes if part.count == 1 else (Line2D([], [], **thin), dashes)


def _no_line() -> Any:
    """For words in the legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], ls="none")


def _letters() -> float:
    """The size of the legend's letters, in points."""
    from matplotlib import rcParams
    from matplotlib.font_manager import FontProperties

    return float(FontProperties(size=rcParams["legend.fontsize"]).get_size_in_points())
