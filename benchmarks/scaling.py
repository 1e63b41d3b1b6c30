"""Reproduce the ALADDIN study's figures 5 and 8b: numbers of workers, and the update period pi.

    python -m benchmarks.scaling --dry-run                     # list the runs and their duration
    python -m benchmarks.scaling --work benchmarks/results/cells --check --save
    python -m benchmarks.scaling --engine virtual              # a minute, without a lab
    python -m benchmarks.scaling --quick

With fewer than eight workers each has its own host, with a server if the algorithm has any. The
cells with eight workers and pi 4 are those of `benchmarks.stragglers`; with a common `--work`
folder they run once. Rerun the same command to resume.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import harness, published, study
from benchmarks.bounds import whole
from benchmarks.cells import ROW_NOTES, Cell
from benchmarks.study import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "scaling"
ALGORITHMS = ("aladdin", "ar-sgd", "asp", "easgd", "osgp", "sgp")
QUICK = {"algorithm": ["aladdin", "ar-sgd"], "workers": [2], "pi": []}
PI = "--aladdin-pi"
DEFAULT_PI = 4

NOTES = f"""\
{study.COLUMN_NOTES}

{ROW_NOTES}

Published: read off figure 5, and figure 8b for the update period, both with CIFAR-10. The study
does not say on how many of its machines two and four workers ran; here each has its own. Its SGP
overlaps its messages with one step, which is `osgp` here."""


def cells(args: argparse.Namespace) -> list[Cell]:
    """Return all cells of a run."""
    found = [
        study.cell(workload, name, 1.0, workers, args.computing)
        for workload in args.workload
        for name in args.algorithm
        for workers in args.workers
    ]
    if "aladdin" in args.algorithm:
        found += [
            study.cell(workload, "aladdin", 1.0, study.WORKERS, args.computing, extra(pi))
            for workload in args.workload
            for pi in args.pi
        ]
    return found


def extra(pi: int) -> tuple[str, ...]:
    """Return the options of an update period; none for the default, which is an ordinary cell."""
    return () if pi == DEFAULT_PI else (PI, str(pi))


def period(cell: Cell) -> int | None:
    """Return the update period of a cell; None: the algorithm has none."""
    if cell.algorithm != "aladdin":
        return None
    return int(cell.extra[cell.extra.index(PI) + 1]) if PI in cell.extra else DEFAULT_PI


def row(result: Result) -> dict[str, Any]:
    """Return a row of the table."""
    cell = result.cell
    return {
        "model": cell.workload.name,
        "algorithm": cell.algorithm,
        "pi": period(cell),
        "workers": cell.workers,
        **study.columns(result, _published(cell)),
    }


def _published(cell: Cell) -> float | None:
    if cell.extra:
        return published.with_period(cell.workload.key, period(cell) or 0)
    return published.with_workers(cell.workload.key, cell.algorithm, cell.workers)


def missed(results: Iterable[Result]) -> list[str]:
    """Return a description of each ALADDIN cell that is not above the published figure."""
    return [
        f"{result.cell.describe()}: a speedup of {result.sent_alone:.2f} by gradients sent "
        f"individually, expected above the published {figure:.2f}"
        for result in results
        if result.cell.algorithm == "aladdin"
        and (figure := _published(result.cell)) is not None
        and result.sent_alone <= figure
    ]


def draw(results: Sequence[Result], path: Path) -> None:
    """Plot a curve for every algorithm over the workers (dashed: published), and over pi."""
    from matplotlib.figure import Figure

    workloads = list(dict.fromkeys(result.cell.workload for result in results))
    figure = Figure(figsize=(10, 3.6 * len(workloads)), layout="constrained")
    for place, workload in enumerate(workloads):
        mine = [result for result in results if result.cell.workload == workload]
        axis = figure.add_subplot(len(workloads), 2, 2 * place + 1)
        axis.set_title(workload.name)
        _draw_workers(axis, [result for result in mine if not result.cell.extra])
        axis = figure.add_subplot(len(workloads), 2, 2 * place + 2)
        axis.set_title(f"{workload.name}: ALADDIN with {study.WORKERS} workers")
        _draw_periods(axis, [result for result in mine if _shows_period(result.cell)])
    figure.savefig(path, dpi=110)


def _shows_period(cell: Cell) -> bool:
    return period(cell) is not None and cell.workers == study.WORKERS


def _draw_workers(axis: Axes, results: Sequence[Result]) -> None:
    for turn, name in enumerate(dict.fromkeys(result.cell.algorithm for result in results)):
        mine = [result for result in results if result.cell.algorithm == name]
        _draw_curve(axis, [(r.cell.workers, r) for r in mine], name, f"C{turn}")
    most = max((result.cell.workers for result in results), default=1)
    axis.plot([0, most], [0, most], color="grey", linewidth=0.8, label="ideal")
    axis.plot([], [], color="grey", linestyle="--", label="published")
    axis.set_xlabel("workers")
    axis.set_ylabel("speed-up")
    axis.legend(fontsize="small")
    axis.grid(alpha=0.3)


def _draw_periods(axis: Axes, results: Sequence[Result]) -> None:
    points = sorted(
        ((period(result.cell) or 0, result) for result in results), key=lambda point: point[0]
    )
    _draw_curve(axis, points, "here", "C0")
    axis.set_xlabel("update period pi")
    axis.set_xticks([pi for pi, _ in points])
    axis.set_ylim(0, study.WORKERS * 1.05)
    axis.grid(alpha=0.3)


def _draw_curve(axis: Axes, points: Sequence[tuple[int, Result]], label: str, colour: str) -> None:
    ours = [result.speed_up for _, result in points]
    axis.plot([x for x, _ in points], ours, "o-", color=colour, label=label)
    study_points = [(x, y) for x, r in points if (y := _published(r.cell)) is not None]
    across, up = [x for x, _ in study_points], [y for _, y in study_points]
    axis.plot(across, up, "x--", color=colour, linewidth=1.0)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the script's own options."""
    add = parser.add_argument
    add("--algorithm", nargs="+", default=list(ALGORITHMS), help="which")
    add("--workers", type=whole(), nargs="+", default=list(published.WORKERS), help="numbers")
    add("--pi", type=whole(), nargs="*", default=list(published.PERIODS), help="update periods")


SCRIPT = study.Script(
    NAME,
    "Measure throughput by number of workers and update period.",
    add_options,
    f"Up to {study.WORKERS} workers on up to {study.HOSTS} hosts at {study.RATE_GBIT:g} Gbit/s",
    NOTES,
    cells,
    row,
    missed,
    draw,
    reduced=QUICK,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    return study.main(SCRIPT, argv)


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
