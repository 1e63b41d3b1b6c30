"""Measure islands: each algorithm with and without `--island node`.

    python -m benchmarks.islands --dry-run                   # list the runs and their duration
    python -m benchmarks.islands --check --save              # requires the network lab and root
    python -m benchmarks.islands --engine virtual
    python -m benchmarks.islands --quick

Four hosts with two workers each, and a server on each host if the algorithm has any. The hosts'
network devices count the bytes between hosts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aladdin_mpi.options.algorithms import find_algorithm
from benchmarks import harness, study
from benchmarks.cells import ROW_NOTES, Cell
from benchmarks.study import Result

NAME = "islands"
OPTION = ("--island", "node")
ALGORITHMS = ("aladdin-ahead", "aladdin", "asp", "bsp", "ar-sgd", "sgp", "local-sgd")
QUICK = {"algorithm": ["aladdin", "sgp"], "workload": ["vgg16"]}
BAR = 0.55
"""Largest share of the bytes between hosts with the option, with two workers on each."""
NOTES = f"""\
{study.COLUMN_NOTES}

{ROW_NOTES}

Between hosts: megabytes sent by the hosts' network devices in the whole run, including start and
end, per batch of one worker; only real runs count them. `ar-sgd` sums over MPI in both rows;
`local-sgd` averages every eighth step."""


def cells(args: argparse.Namespace) -> list[Cell]:
    """Return the cells: each algorithm without and with the option."""
    found = []
    for workload in args.workload:
        for name in args.algorithm:
            cell = study.cell(workload, name, 1.0, study.WORKERS, args.computing)
            library = ("--ar-sgd-allreduce", "mpi") if name == "ar-sgd" else ()
            plain = replace(cell, mpi_extra=library)
            found += [plain, replace(plain, extra=OPTION)]
    return found


def row(result: Result) -> dict[str, Any]:
    """Return a row of the table."""
    cell = result.cell
    return {
        "model": cell.workload.name,
        "algorithm": cell.algorithm,
        "islands": "of two" if cell.extra else "",
        **study.columns(result, None),
        "between hosts, MB": between_hosts(result),
    }


def between_hosts(result: Result) -> float | None:
    """Return the megabytes per batch of one worker; None: they were not counted."""
    sent = result.main.get("sent between hosts, MB")
    return None if sent is None else float(sent) / result.cell.samples


def pairs(results: Sequence[Result]) -> Iterable[tuple[Result, Result]]:
    """Return each algorithm's two results, the one without the option first."""
    for with_it in results:
        if with_it.cell.extra:
            plain = replace(with_it.cell, extra=())
            yield next(each for each in results if each.cell == plain), with_it


def missed(results: Sequence[Result]) -> list[str]:
    """Return a description of each algorithm whose bytes between hosts have not halved."""
    found = []
    for without, with_it in pairs(results):
        before, after = between_hosts(without), between_hosts(with_it)
        if before is not None and after is not None and after > BAR * before:
            found.append(
                f"{with_it.cell.describe()}: {after / before:.2f} of the bytes between hosts, "
                f"expected at most {BAR:.2f}"
            )
    return found


def draw(results: Sequence[Result], path: Path) -> None:
    """Plot a pair of bars for each algorithm."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axis = figure.add_subplot()
    both = list(pairs(results))
    names = [f"{each.cell.algorithm}\n{each.cell.workload.name}" for each, _ in both]
    for turn, label in enumerate(("single workers", "islands of two")):
        places = [place + 0.4 * (turn - 0.5) for place in range(len(both))]
        axis.bar(places, [pair[turn].speed_up for pair in both], 0.38, label=label)
    axis.axhline(study.WORKERS, color="grey", linewidth=0.8)
    axis.set_xticks(range(len(both)), names)
    axis.set_ylabel(f"speed-up, {study.WORKERS} workers")
    axis.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def _add_options(parser: argparse.ArgumentParser) -> None:
    able = [name for name in ALGORITHMS if find_algorithm(name).islands]
    parser.add_argument("--algorithm", nargs="+", choices=able, default=able, help="algorithms")
    parser.set_defaults(workload=["vgg16"])


SCRIPT = study.Script(
    NAME,
    "Measure islands of two workers.",
    _add_options,
    "Islands: 4 hosts of 2 workers at one tenth",
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
