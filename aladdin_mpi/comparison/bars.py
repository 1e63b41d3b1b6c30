"""Throughput of each algorithm, as bars beside what the workers could do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aladdin_mpi.comparison.curves import empty_figure
from aladdin_mpi.comparison.figures import Row
from aladdin_mpi.comparison.table import four_digits

HALF = 0.35
"""Of a bar's height, where bars are 1 apart."""
GREY = "0.35"
SMALL = 8


def throughput(rows: Sequence[Row], colours: Mapping[str, str], ideals: Mapping[str, float]) -> Any:
    """The highest on top, with the standard deviation over the runs; None without any figure.

    Args:
        rows: in any order.
        colours: by label.
        ideals: by label the sum of the workers' own speeds, in samples/s.
    """
    known = [row for row in rows if row.figures["samples_per_second"] is not None]
    if not known:
        return None
    ranked = sorted(known, key=lambda row: row.mean("samples_per_second") or 0.0)
    figure = empty_figure(8.5, 1.5 + 0.34 * len(ranked))
    axis = figure.add_subplot()
    ends = [_bar(axis, place, row, colours[row.label]) for place, row in enumerate(ranked)]
    marks = {place: ideals[row.label] for place, row in enumerate(ranked) if row.label in ideals}
    for place, ideal in marks.items():
        axis.vlines(ideal, place - 0.5, place + 0.5, color=GREY, lw=1.4, ls=(0, (4, 2)))
    _label(axis, ranked, bool(marks))
    axis.set_xlim(0, 1.04 * max([*ends, *marks.values(), 1e-9]))
    axis.xaxis.set_major_formatter("{x:,.10g}")
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    return figure


def _bar(axis: Any, place: int, row: Row, colour: str) -> float:
    """Returns where it ends, its error bar with it."""
    found = row.figures["samples_per_second"]
    assert found is not None
    axis.barh(place, found.mean, color=colour, height=2 * HALF)
    if not found.std:
        return found.mean
    # Grey on white, which is seen on a bar of any colour.
    for width, line in ((3.4, "white"), (1.4, GREY)):
        axis.errorbar(
            found.mean, place, xerr=found.std, color=line, lw=width, capsize=4, capthick=width
        )
    return found.mean + found.std


def _label(axis: Any, ranked: Sequence[Row], has_ideal: bool) -> None:
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
