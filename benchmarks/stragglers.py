"""Reproduce the ALADDIN study's table 3: eight workers on four hosts, of which one is slower.

    python -m benchmarks.stragglers --dry-run                  # list the runs and their duration
    python -m benchmarks.stragglers --work benchmarks/results/cells --check --save
    python -m benchmarks.stragglers --engine virtual           # a few minutes, without a lab
    python -m benchmarks.stragglers --quick

Runs over MPI in the network lab (requires root) and simulated. Rerun the same command to resume.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import harness, published, study
from benchmarks.bounds import at_least
from benchmarks.cells import ROW_NOTES, Cell, Workload
from benchmarks.study import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "stragglers"
ALGORITHMS = ("aladdin", "ar-sgd", "osgp", "sgp", "bsp", "asp", "ssp", "easgd", "ad-psgd")
QUICK = {"algorithm": ["aladdin", "ar-sgd"], "slowdown": [1.0, 10.0]}
OURS = ("aladdin", "aladdin-ahead")
BAR_IDEAL = 0.97
"""Smallest share of the ideal speedup for ALADDIN in every cell."""

NOTES = f"""\
{study.COLUMN_NOTES}

{ROW_NOTES}

`ar-sgd` sums with Horovod over MPI in a ring, the fastest of Open MPI's algorithms in the lab; its
ranks sleep instead of spinning, since they share two cores (benchmarks/resting.py). The study's SGP
overlaps its messages with one step, which is `osgp` here; `sgp` waits for them in every step.

The bars apply to ALADDIN and `aladdin-ahead`: the speedup is at least {BAR_IDEAL:.0%} of the ideal
one, the speedup by the gradients that were sent individually is above ALADDIN's published figure,
and no gradient is dropped."""


def cells(args: argparse.Namespace) -> list[Cell]:
    """Return all cells of a run."""
    return [
        study.cell(workload, algorithm, slowdown, study.WORKERS, args.computing)
        for workload in args.workload
        for algorithm in args.algorithm
        for slowdown in args.slowdown
    ]


def row(result: Result) -> dict[str, Any]:
    """Return a row of the table."""
    cell = result.cell
    return {
        "model": cell.workload.name,
        "algorithm": cell.algorithm,
        "slow-down of one": cell.slowdown,
        **study.columns(result, _published(cell)),
    }


def _published(cell: Cell) -> float | None:
    return published.with_straggler(cell.workload.key, cell.algorithm, cell.slowdown)


def missed(results: Iterable[Result]) -> list[str]:
    """Return a description of each ALADDIN cell that misses a bar."""
    found = []
    for result in results:
        cell, figure = result.cell, _published(result.cell)
        if cell.algorithm not in OURS:
            continue
        if result.speed_up < BAR_IDEAL * cell.ideal:
            found.append(
                f"{cell.describe()}: a speedup of {result.speed_up:.2f}, expected at least "
                f"{BAR_IDEAL:.0%} of {cell.ideal:.2f}"
            )
        if figure is not None and result.sent_alone <= figure:
            found.append(
                f"{cell.describe()}: a speedup of {result.sent_alone:.2f} by gradients sent "
                f"individually, expected above the published {figure:.2f}"
            )
        if result.main["dropped"]:
            found.append(f"{cell.describe()}: {result.main['dropped']} gradients dropped")
    return found


def draw(results: Sequence[Result], path: Path) -> None:
    """Plot bars for every network, algorithm and slowdown, with marks at the published figures."""
    from matplotlib.figure import Figure

    workloads = list(dict.fromkeys(result.cell.workload for result in results))
    figure = Figure(figsize=(10, 3.4 * len(workloads)), layout="constrained")
    for place, workload in enumerate(workloads, start=1):
        axis = figure.add_subplot(len(workloads), 1, place)
        _draw_bars(axis, workload, [r for r in results if r.cell.workload == workload])
    figure.axes[0].legend(ncols=5, fontsize="small", loc="upper right")
    figure.savefig(path, dpi=110)


def _draw_bars(axis: Axes, workload: Workload, results: Sequence[Result]) -> None:
    algorithms = list(dict.fromkeys(result.cell.algorithm for result in results))
    slowdowns = sorted({result.cell.slowdown for result in results})
    width = 0.8 / len(slowdowns)
    marks: list[tuple[float, float]] = []
    for turn, slowdown in enumerate(slowdowns):
        shown = [result for result in results if result.cell.slowdown == slowdown]
        at = [algorithms.index(r.cell.algorithm) + (turn + 0.5) * width - 0.4 for r in shown]
        label = "all equal" if slowdown == 1 else f"one {slowdown:g} times slower"
        axis.bar(at, [r.speed_up for r in shown], width * 0.92, color=f"C{turn}", label=label)
        figures = [_published(result.cell) for result in shown]
        marks += [(x, y) for x, y in zip(at, figures, strict=True) if y is not None]
    across, up = [x for x, _ in marks], [y for _, y in marks]
    axis.scatter(across, up, marker="_", s=120, color="black", zorder=3, label="published")
    axis.set_title(workload.name)
    axis.set_ylabel("speed-up")
    axis.set_xticks(range(len(algorithms)), algorithms)
    axis.set_ylim(0, study.WORKERS * 1.15)
    axis.grid(axis="y", alpha=0.3)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the script's own options."""
    add = parser.add_argument
    add("--algorithm", nargs="+", default=list(ALGORITHMS), help="which")
    add(
        "--slowdown",
        type=at_least(1),
        nargs="+",
        default=list(published.SLOWDOWNS),
        help="slowdown factors of worker 0",
    )


SCRIPT = study.Script(
    NAME,
    "Measure throughput with one slower worker, for comparison with the study's.",
    add_options,
    f"{study.WORKERS} workers on {study.HOSTS} hosts at {study.RATE_GBIT:g} Gbit/s, one slower",
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
