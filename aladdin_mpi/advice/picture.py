"""The advice for the eye: what each candidate brings, and how the best ones scale."""

from __future__ import annotations

from pathlib import Path

from aladdin_mpi.advice.report import Advice, knee
from aladdin_mpi.comparison.plots import COLOURS, DPI, MARKERS
from aladdin_mpi.process.files import written_whole

MOST = 14
"""Bars."""


def draw(advice: Advice, path: Path) -> None:
    """Write the picture to a PNG file."""
    from matplotlib.figure import Figure

    known = [entry for entry in advice.entries if entry.timed is not None][:MOST]
    panels = 2 if advice.scaling else 1
    figure = Figure(figsize=(6.5 * panels, 0.34 * len(known) + 1.4), layout="constrained")
    axis = figure.add_subplot(1, panels, 1)
    places = range(len(known))
    speeds = [advice.speed_up(entry.rate) for entry in known]
    errors = [
        [speed - advice.speed_up(e.between[0]) for speed, e in zip(speeds, known, strict=True)],
        [advice.speed_up(e.between[1]) - speed for speed, e in zip(speeds, known, strict=True)],
    ]
    axis.barh(places, speeds, xerr=errors, color=COLOURS[0], ecolor="grey", label="speed-up")
    if advice.weighs:
        counts = [advice.speed_up(advice.score(entry)) for entry in known]
        axis.plot(counts, places, "D", color=COLOURS[1], label="by what a sample teaches")
    axis.axvline(advice.ground.ideal, color="grey", linewidth=0.8, linestyle="--", label="ideal")
    axis.set_yticks(places, [entry.candidate.describe() for entry in known])
    axis.invert_yaxis()
    axis.set_xlabel(f"times one worker, {advice.ground.workers} workers")
    axis.legend(fontsize="small")
    if advice.scaling:
        _draw_scaling(advice, figure.add_subplot(1, panels, 2))
    with written_whole(path) as temporary:
        figure.savefig(temporary, dpi=DPI)


def _draw_scaling(advice: Advice, axis: object) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axis, Axes)
    for turn, (name, points) in enumerate(advice.scaling.items()):
        workers = [n for n, *_ in points]
        colour = COLOURS[turn % len(COLOURS)]
        axis.plot(
            workers, [s for _, s, _ in points], marker=MARKERS[turn], color=colour, label=name
        )
        if (end := knee(points)) is not None:
            axis.axvline(end, color=colour, linewidth=0.6, linestyle=":")
    first = next(iter(advice.scaling.values()))
    axis.plot([n for n, *_ in first], [i for *_, i in first], "--", color="grey", label="ideal")
    axis.set_xlabel("workers")
    axis.set_ylabel("times one worker")
    axis.legend(fontsize="small")
    axis.grid(alpha=0.3)
