"""Measure training throughput on the papers' cluster at one tenth, with or without stragglers.

    python -m benchmarks.throughput --check
    python -m benchmarks.throughput --slowdown 1 2 10 100 -- --wire bf16

Four hosts with links of 1 Gbit/s in the network lab (requires root), eight workers with timed
computing, one server on each host: cells like those of `benchmarks.stragglers`, with any options.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from aladdin_mpi.options.algorithms import find_algorithm
from benchmarks import harness
from benchmarks.bounds import at_least, positive, whole
from benchmarks.cells import ROW_NOTES, WORKLOADS, Cell
from benchmarks.engines import LabEngine
from benchmarks.machine import machine

BAR_SPEEDUP = 7.7 / 8
"""Smallest speedup of a whole run per worker, with equal workers."""
BAR_WAIT = 0.02
"""Largest share of time that workers wait."""

NOTES = f"""\
{ROW_NOTES}

Cores busy: cores of this machine in use by any process."""


def row(cell: Cell, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the table."""
    about = {
        "model": cell.workload.name,
        "algorithm": cell.algorithm,
        "slow-down of one": cell.slowdown,
        "ideal": cell.ideal,
    }
    return {**about, **figures}


def missed(table: Iterable[Mapping[str, Any]], workers: int) -> list[str]:
    """Return a description of each row without a straggler that misses a bar."""
    found = []
    for line in table:
        if line["slow-down of one"] > 1:
            continue
        if line["whole run"] < BAR_SPEEDUP * workers:
            found.append(
                f"{line['model']}: a speedup of {line['whole run']:.2f} over the whole run, "
                f"expected at least {BAR_SPEEDUP * workers:.2f}"
            )
        if line["wait fraction"] > BAR_WAIT:
            found.append(
                f"{line['model']}: workers wait for {line['wait fraction']:.1%} of their time, "
                f"expected at most {BAR_WAIT:.0%}"
            )
    return found


def middle(repeats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combine several rows of the same cell: the median of every numeric column."""
    return {
        key: median(row[key] for row in repeats) if isinstance(value, (int, float)) else value
        for key, value in repeats[0].items()
    }


def measure(cells: Sequence[Cell], repeats: int) -> list[dict[str, Any]]:
    """Return the table from runs in one lab; the repeats of a cell are spread over time."""
    found: list[list[dict[str, Any]]] = [[] for _ in cells]
    with LabEngine() as engine:
        for _ in range(repeats):
            for cell, rows in zip(cells, found, strict=True):
                print(f"{cell.describe()} ...", file=sys.stderr)
                rows.append(row(cell, engine.run(cell)))
    return [middle(rows) for rows in found]


def cells(args: argparse.Namespace) -> list[Cell]:
    """Return a cell for every network and slowdown."""
    servers = args.hosts if find_algorithm(args.algorithm).has_servers else 0
    about = args.workers, servers, args.hosts, args.rate, args.iterations, tuple(args.extra)
    return [
        Cell(WORKLOADS[name], args.algorithm, slowdown, *about)
        for name in args.workload
        for slowdown in args.slowdown
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = harness.make_parser("throughput", "Measure training throughput in the network lab.")
    add = parser.add_argument
    add("--workload", choices=list(WORKLOADS), nargs="+", default=list(WORKLOADS), help="models")
    add("--algorithm", default="aladdin", help="algorithm of aladdin_mpi.train")
    add(
        "--slowdown",
        type=at_least(1),
        nargs="+",
        default=[1.0],
        help="slowdown factors of one worker, one row each",
    )
    add(
        "--iterations",
        type=whole(),
        default=200,
        help="steps of each worker that is not slowed down",
    )
    add("--workers", type=whole(), default=8, help="spread over the hosts")
    add(
        "--hosts",
        type=whole(),
        default=4,
        help="number of hosts, each with a server if the algorithm has any",
    )
    add("--rate", type=positive, default=1.0, help="rate of each host's link in Gbit/s")
    add("--repeats", type=whole(), default=1, help="runs of each row of which the median is taken")
    add("extra", nargs="*", help="after '--': further options for aladdin_mpi.train")
    args = parser.parse_args(argv)
    facts = machine()
    table = measure(cells(args), args.repeats)
    title = f"{args.workers} workers on {args.hosts} hosts at {args.rate:g} Gbit/s, timed computing"
    found = harness.Findings(title, table, NOTES, missed(table, args.workers))
    return harness.publish("throughput", argv, args, facts, found)


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
