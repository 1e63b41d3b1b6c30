"""Plot the time to the target of every algorithm, with and without a slow worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import NullFormatter, ScalarFormatter

COLOURS = ("#4c9f70", "#e8a33d", "#c8504b")
Rows = Sequence[Mapping[str, Any]]


def race_rows(table: Rows) -> dict[str, dict[str, float | None]]:
    """Return the seconds to the target by algorithm and by part of the race; None: not reached.

    They are sorted by the time with the slowest worker; algorithms that never reach the target
    come last.
    """
    found: dict[str, dict[str, float | None]] = {}
    for row in table:
        if row["part"].startswith("race"):
            found.setdefault(row["algorithm"], {})[row["part"]] = row["to target, s"]
    return dict(sorted(found.items(), key=lambda item: _slowest(item[1])))


def _slowest(times: Mapping[str, float | None]) -> float:
    """Return the seconds with the slowest worker that was tried."""
    seconds = times[max(times, key=_factor)]
    return float("inf") if seconds is None else seconds


def _factor(part: str) -> int:
    """Return the slowdown factor of a worker in a part of the race."""
    _, _, factor = part.partition("slow ")
    return int(factor or 1)


def _longest(algorithms: Mapping[str, Mapping[str, float | None]]) -> float:
    return max((t for times in algorithms.values() for t in times.values() if t), default=1000.0)


def draw_race(table: Rows, path: Path) -> None:
    """Write the figure of the parts race, if the table has any."""
    algorithms = race_rows(table)
    if not algorithms:
        return
    parts = list(dict.fromkeys(row["part"] for row in table if row["part"].startswith("race")))
    target = next(row["target"] for row in table if row["part"] == parts[0])
    figure = Figure(figsize=(8.4, 1.4 + 0.42 * len(algorithms)), layout="constrained")
    axis = figure.add_subplot()
    height = 0.8 / len(parts)
    for turn, part in enumerate(parts):
        for place, times in enumerate(algorithms.values()):
            _bar(axis, place + (turn - (len(parts) - 1) / 2) * height, height, times, part, turn)
    axis.set_yticks(range(len(algorithms)), list(algorithms))
    axis.set_ylim(len(algorithms) - 0.5, -0.5)
    axis.set_xscale("log")
    # Space for the longest bar's label; the axis starts well below the shortest bar.
    axis.set_xlim(100, 1.6 * _longest(algorithms))
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel(f"seconds of the modelled cluster to {target:g} % accuracy")
    axis.grid(axis="x", which="both", alpha=0.25)
    handles = [Patch(color=COLOURS[turn % 3]) for turn in range(len(parts))]
    figure.legend(
        handles, [_named(part) for part in parts], fontsize=8, loc="outside upper center", ncols=3
    )
    figure.savefig(path, dpi=110, metadata={"Software": ""})


def _bar(
    axis: Any, y: float, height: float, times: Mapping[str, float | None], part: str, turn: int
) -> None:
    seconds = times.get(part)
    if seconds is not None:
        axis.barh(y, seconds, height, color=COLOURS[turn % 3])
        axis.text(seconds, y, f" {seconds:,.0f}", va="center", fontsize=7)
        return
    text = "never" if part in times else "not run"
    left_edge = axis.get_yaxis_transform()
    axis.text(0.005, y, text, va="center", fontsize=7, color=COLOURS[turn % 3], transform=left_edge)


def _named(part: str) -> str:
    factor = _factor(part)
    return f"one worker {factor} times slower" if factor > 1 else "all workers equal"
