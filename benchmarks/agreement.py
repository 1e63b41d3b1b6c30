"""Compare the throughput of simulations with that of runs over MPI.

    python -m benchmarks.agreement --work benchmarks/results/cells --check --save
    python -m benchmarks.agreement --quick

The cells are those of `benchmarks.stragglers` and `benchmarks.scaling`; their MPI runs in the same
`--work` folder are reused. Requires the network lab and root.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aladdin_mpi.errors import UserError
from benchmarks import harness, quick, scaling, stragglers, study
from benchmarks.cells import ROW_NOTES, Cell
from benchmarks.study import Result

NAME = "agreement"
BAR = 0.05
"""Largest error of a predicted throughput, as a share of the measured one."""

NOTES = f"""\
{study.COLUMN_NOTES}

{ROW_NOTES}

The simulation's model of the lab is the same for all cells: the rate of links (less the frames'
headers), how messages share them, from traces of messages alone (`benchmarks.sharing`), and a
latency and overhead of single messages that were set beforehand (benchmarks/engines.py). Rows are
in order of their error."""


def cells(args: argparse.Namespace) -> list[Cell]:
    """Return all cells of the two tables.

    Raises:
        UserError: one of the engines is missing.
    """
    if set(study.engines(args)) != set(study.ENGINES):
        raise UserError(
            f"--engine: expected {' and '.join(study.ENGINES)}, got {' '.join(study.engines(args))}"
            "; the comparison needs both, and the network lab: see benchmarks/lab.py"
        )
    found: list[Cell] = []
    for script in (stragglers.SCRIPT, scaling.SCRIPT):
        parser = argparse.ArgumentParser()
        script.add_options(parser)
        own = quick.parse(parser, ["--quick"] if args.quick else [], script.reduced)
        found += script.cells(argparse.Namespace(**{**vars(own), **vars(args)}))
    return found


def row(result: Result) -> dict[str, Any]:
    """Return a row of the table."""
    cell = result.cell
    return {
        "model": cell.workload.name,
        "algorithm": cell.algorithm,
        "workers": cell.workers,
        "slow-down of one": cell.slowdown,
        "options": " ".join(cell.extra),
        "virtual": result.figures["virtual"]["speed-up"],
        "real": result.figures["real"]["speed-up"],
        "error": result.error,
        "waiting, virtual": result.figures["virtual"]["wait fraction"],
        "waiting, real": result.figures["real"]["wait fraction"],
        "cores busy": result.main.get("cores busy"),
    }


def missed(results: Sequence[Result]) -> list[str]:
    """Return a description of each cell whose prediction is too far off."""
    return [
        f"{result.cell.describe()}: predicted {result.error:+.1%} off, expected at most {BAR:.0%}"
        for result in by_error(results)
        if result.error is None or abs(result.error) > BAR
    ]


def by_error(results: Sequence[Result]) -> list[Result]:
    """Sort the results by their error, largest first."""
    return sorted(results, key=lambda result: -abs(result.error or 0.0))


def draw(results: Sequence[Result], path: Path) -> None:
    """Plot every cell as a point: measured speedup on the x axis, predicted on the y axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 6), layout="constrained")
    axis = figure.add_subplot()
    for turn, name in enumerate(dict.fromkeys(result.cell.algorithm for result in results)):
        mine = [result for result in results if result.cell.algorithm == name]
        real = [result.figures["real"]["speed-up"] for result in mine]
        virtual = [result.figures["virtual"]["speed-up"] for result in mine]
        axis.scatter(real, virtual, s=18, color=f"C{turn}", label=name)
    ends = [0.05, 10.0]
    axis.plot(ends, ends, color="grey", linewidth=0.8)
    low, high = ([end * (1 + error) for end in ends] for error in (-BAR, BAR))
    axis.fill_between(ends, low, high, color="grey", alpha=0.2, label=f"within {BAR:.0%}")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("speedup over MPI")
    axis.set_ylabel("speedup in the simulation")
    axis.legend(fontsize="small")
    figure.savefig(path, dpi=110)


SCRIPT = study.Script(
    NAME,
    "Compare simulated with measured throughput.",
    lambda parser: None,
    "Throughput in the simulation and over MPI in the network lab",
    NOTES,
    cells,
    row,
    missed,
    draw,
    order=by_error,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    return study.main(SCRIPT, argv)


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
