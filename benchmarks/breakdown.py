"""Divide a worker's training time into computing and waiting for other workers and messages.

    python -m benchmarks.breakdown --save
    python -m benchmarks.breakdown --quick

Simulations with the networks, step times and links of the ALADDIN study's cluster of four hosts.
The study states that "more than 60 %" of the training time is communication, which is its reason
for letting workers never wait.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aladdin_mpi.comparison.plots import style
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import find_algorithm
from benchmarks import harness, quick
from benchmarks.bounds import whole
from benchmarks.cells import WORKLOADS, Cell
from benchmarks.engines import VirtualEngine
from benchmarks.harness import Findings
from benchmarks.machine import machine
from benchmarks.results import RESULTS
from benchmarks.study import HOSTS, RATE_GBIT

_SYNCHRONOUS = ("bsp", "ar-sgd", "sgp", "osgp", "local-sgd")
ALGORITHMS = (*_SYNCHRONOUS, "asp", "ssp", "easgd", "ad-psgd", "gosgd", "aladdin", "aladdin-ahead")
OVERLAPPING = ("bsp", "ar-sgd", "asp", "ssp", "aladdin")
"""Whether gradients are sent during backward."""
WORKERS = (2, 4, 8, 16, 24)
ITERATIONS = 40
PUBLISHED = 0.6
"""Share of the training time that is communication; the slides say "more than" this."""

TITLE = "Computing and waiting in a worker's training time"
NOTES = f"""\
Waiting for messages and for slower workers, in % of the training time until all samples have been
granted, as the mean over the workers; the rest is computing. At the end: with `--no-wait-free`,
gradients are sent after backward. {ITERATIONS} simulated steps, {HOSTS} hosts with links of 10
Gbit/s (fewer workers: a host each) and servers on all of them; step times vary by 1.3 %."""
QUICK = {"algorithms": ["ar-sgd", "aladdin"], "workers": [2, 4], "workload": ["resnet50"]}


def cell(workload: str, algorithm: str, workers: int, extra: tuple[str, ...] = ()) -> Cell:
    """Simulate one run; each host has a server, if the algorithm has any."""
    hosts = min(HOSTS, workers)
    servers = hosts if find_algorithm(algorithm).has_servers else 0
    return Cell(
        WORKLOADS[workload], algorithm, 1.0, workers, servers, hosts, RATE_GBIT, ITERATIONS, extra
    )


def waiting(chosen: Cell) -> float:
    """Return the share of the training time, from 0 to 1, in which workers do not compute."""
    with VirtualEngine() as engine:
        return float(engine.run(chosen)["wait until all are drawn"])


def row(workload: str, algorithm: str, counts: Sequence[int]) -> dict[str, Any]:
    """Return a row of the table."""
    waits: dict[str, float | None] = {
        f"{count} workers": 100 * waiting(cell(workload, algorithm, count)) for count in counts
    }
    for count in counts:
        late = cell(workload, algorithm, count, ("--no-wait-free",))
        at_the_end = 100 * waiting(late) if algorithm in OVERLAPPING else None
        waits[f"{count}, at the end"] = at_the_end
    print(f"{WORKLOADS[workload].name}, {algorithm}: done", file=sys.stderr)
    return {"model": WORKLOADS[workload].name, "algorithm": algorithm, **waits}


def draw(rows: Sequence[Mapping[str, Any]], counts: Sequence[int], path: Path) -> None:
    """Plot a bar for each algorithm and number of workers: waiting, and computing above it."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(11, 3.2 * len(models)), layout="constrained")
    for place, model in enumerate(models, start=1):
        axis = figure.add_subplot(len(models), 1, place)
        mine = [row for row in rows if row["model"] == model]
        width = 0.84 / len(counts)
        for turn, count in enumerate(counts):
            x = [i + (turn - (len(counts) - 1) / 2) * width for i in range(len(mine))]
            waits = [row[f"{count} workers"] for row in mine]
            late = [row[f"{count}, at the end"] or 0.0 for row in mine]
            colour = style(turn)["color"]
            axis.bar(x, late, width, color=colour, alpha=0.3)
            axis.bar(x, waits, width, color=colour, label=f"{count} workers")
        axis.axhline(100 * PUBLISHED, color="0.4", linewidth=0.8, linestyle=":")
        axis.set_xticks(range(len(mine)), [row["algorithm"] for row in mine])
        axis.set_ylim(0, 100)
        axis.set_ylabel("waiting, % of the time")
        axis.set_title(f"{model}; pale: gradients are sent after backward", fontsize=10)
        axis.legend(fontsize=7, ncols=len(counts))
    figure.savefig(path, dpi=110, metadata={"Software": ""})


def missed(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a description of each case in which asymmetric workers wait."""
    return [
        f"{row['model']}: a worker of {row['algorithm']} waits {wait:.1f} % of the time ({name}), "
        "expected at most 1"
        for row in rows
        if row["algorithm"].startswith("aladdin")
        for name, wait in row.items()
        if name.endswith("workers") and wait > 1
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = quick.parse(_parser(), argv, QUICK)
    for name in args.algorithms:
        if name not in ALGORITHMS:
            raise UserError(f"--algorithms: expected some of {', '.join(ALGORITHMS)}, got {name!r}")
    facts = machine()
    rows = [
        row(workload, name, args.workers) for workload in args.workload for name in args.algorithms
    ]
    notes = NOTES
    if args.save is not None:
        args.save.mkdir(parents=True, exist_ok=True)
        draw(rows, args.workers, args.save / "breakdown.png")
    if args.save == RESULTS:
        notes += "\n\n![Share of waiting by algorithm and workers](breakdown.png)"
    found = Findings(TITLE, rows, notes, missed(rows))
    return harness.publish("breakdown", argv, args, facts, found)


def _parser() -> argparse.ArgumentParser:
    parser = harness.make_parser("breakdown", (__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--algorithms", nargs="+", default=list(ALGORITHMS), metavar="NAME", help="which")
    add("--workers", type=whole(2), nargs="+", default=list(WORKERS), help="numbers of workers")
    names = list(WORKLOADS)
    add("--workload", nargs="+", choices=names, default=names, help="networks")
    return parser


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
