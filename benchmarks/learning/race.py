"""The time to the target of every algorithm, with and without a slow worker, for the eye."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

COLOURS = ("#4c9f70", "#e8a33d", "#c8504b")
Rows = Sequence[Mapping[str, Any]]


def race_rows(table: Rows) -> dict[str, dict[str, float | None]]:
    """By algorithm, and by part of the race, the seconds to the target; None: not reached.

    The first at the target with the slowest worker comes first, who never gets there last.
    """
    found: dict[str, dict[str, float | None]] = {}
    for row in table:
        if row["part"].startswith("race"):
            found.setdefault(row["algorithm"], {})[row["part"]] = row["to target, s"]
    return dict(sorted(found.items(), key=lambda item: _slowest(item[1])))


def _slowest(times: Mapping[str, float | None]) -> float:
    last = list(times.values())[-1]
    return float("inf") if last is None else last


def draw_race(table: Rows, path: Path) -> None:
    """Write the picture of the parts race, if the table has any."""
    algorithms = race_rows(table)
    if not algorithms:
        return
    parts = list(dict.fromkeys(row["part"] for row in table if row["part"].startswith("race")))
    target = next(row["target"] for row in table if row["part"] == parts[0])
    figure = Figure(figsize=(8.4, 1.2 + 0.42 * len(algorithms)), layout="constrained")
    axis = figure.add_subplot()
    height = 0.8 / len(parts)
    for turn, part in enumerate(parts):
        for place, times in enumerate(algorithms.values()):
            _bar(axis, place + (turn - (len(parts) - 1) / 2) * height, height, times, part, turn)
    axis.set_yticks(range(len(algorithms)), list(algorithms))
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.set_xlabel(f"seconds of the modelled cluster to {target:g} % accuracy")
    axis.grid(axis="x", which="both", alpha=0.25)
    handles = [axis.barh(0, 0, color=COLOURS[turn % 3]) for turn in range(len(parts))]
    axis.legend(handles, [_named(part) for part in parts], fontsize=8, loc="lower right")
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
    _, _, factor = part.partition("slow ")
    return f"one worker {factor} times slower" if factor else "all workers alike"
