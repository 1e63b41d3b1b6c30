"""Compare simulated speedups with those published in the IPDPS 2021 study.

    python -m benchmarks.ipdps --save
    python -m benchmarks.ipdps --quick

24 workers on three machines of two virtual machines each, ResNet-50 and VGG-16 with ImageNet's
shapes, 10 and 56 Gbit/s: figure 2 (BSP, ASP, SSP, AR-SGD, AD-PSGD at 2 to 24 workers) and
figure 4 (BSP, ASP, SSP with no optimisation, sharding, wait-free backpropagation, deep gradient
compression). Each cell is simulated with the links alone, and with one assumption changed after the
other, to find those that make the difference. Finished runs are kept in a file; rerun the same
command to resume.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aladdin_mpi.errors import UserError
from benchmarks import harness, ipdps_plots, ipdps_reasons, quick
from benchmarks.bounds import data_file, whole
from benchmarks.ipdps_paper import (
    ALGORITHMS,
    FIGURE_2,
    FIGURE_4,
    NETS,
    NETWORKS,
    SERVED,
    STAGES,
)
from benchmarks.ipdps_run import VM, Run, speed_up
from benchmarks.kept_lines import whole_lines
from benchmarks.machine import machine

HOSTS = {"memory_gbyte": 10.0, "handling_us": 1000.0, "local_bandwidth_gbit": 17.0}
"""Costs of copies in processes and machines: see :data:`benchmarks.ipdps_reasons.NOTES`."""
SELECTION = 0.18
"""Seconds per step of deep gradient compression in the study, with either network."""
AVERAGING = {"resnet50": 0.15, "vgg16": 0.55}
"""Seconds per step of AD-PSGD's exchange with 8 workers at 56 Gbit/s, from figure 3."""
TAKING = {"memory_gbyte": 7.4}
"""Equivalent memory rate of assumption F: 7 bytes moved per byte received, with 11 gradients for
each model sent, at 10 GB/s: 57 / 77."""
PUSHING = 0.13
"""Seconds in which a worker sends and receives ResNet-50's 54 messages, and copies their data."""
WHOLE_MB = 1000.0
"""One message per server: nothing is sent while something else is summed."""
LEAST_ROUNDS = 3
QUICK = {
    "figure": [2],
    "network": ["vgg16"],
    "gbit": [10],
    "workers": [24],
    "rounds": LEAST_ROUNDS,
    "done": None,  # results of an older program do not count
}
FACTORS = (0.8, 1.25)
"""Factors on the time of a step, to measure the sensitivity to it."""


@dataclass(frozen=True)
class Cell:
    """A value published in the study."""

    figure: int
    network: str
    gbit: int
    algorithm: str
    workers: int
    stage: str
    published: float


def cells() -> list[Cell]:
    """Return all cells of figure 2, then all of figure 4."""
    found = [
        Cell(2, network, gbit, algorithm, workers, "wait-free", value)
        for (network, gbit), curves in FIGURE_2.items()
        for algorithm, curve in curves.items()
        for workers, value in curve.items()
    ]
    found += [
        Cell(4, network, gbit, algorithm, 24, stage, value)
        for (network, gbit), bars in FIGURE_4.items()
        for algorithm, values in bars.items()
        for stage, value in zip(STAGES, values, strict=True)
    ]
    return found


class Book:
    """Speedups of finished runs, kept in a file.

    Args:
        path: a file with one JSON object per line; it does not record changes to the program.
            None: nothing is kept.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._found: dict[str, float] = {}
        if path is not None and path.exists():
            self._found = dict(_read(path))

    def speed_up(self, run: Run) -> float:
        """Return a run's speedup; simulate it if it is not in the file."""
        if run.key not in self._found:
            print(f"{run.key} ...", file=sys.stderr, flush=True)
            self._found[run.key] = speed_up(run)
            self._keep(run)
        return self._found[run.key]

    def _keep(self, run: Run) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            line = {"run": run.key, "speed_up": self._found[run.key]}
            file.write(json.dumps(line) + "\n")

    def best(self, run: Run) -> Run:
        """Return the run with the best ratio of servers for four workers, as in the study.

        Of ratios that differ by at most 1 %, it is the smallest.
        """
        if run.algorithm not in SERVED or run.stage == "none":
            return run
        alone = replace(run, workers=VM, gbit=NETS[0], stage="wait-free")
        ratios = [1, 2, 4]
        found = {ratio: self.speed_up(replace(alone, per_vm=ratio)) for ratio in ratios}
        enough = max(found.values()) * 0.99
        return replace(run, per_vm=next(ratio for ratio in ratios if found[ratio] >= enough))


def _read(path: Path) -> Iterator[tuple[str, float]]:
    for number, line in whole_lines(path):
        try:
            found = json.loads(line)
            yield found["run"], float(found["speed_up"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"--done: expected a finished run as JSON in {path}, line {number}, got "
                f"{line[:60]!r}; remove the line to repeat the run"
            ) from error


def measure(cell: Cell, book: Book, rounds: int) -> dict[str, Any]:
    """Return a cell's row: the study's value, the simulated one, and with changed assumptions."""
    plain = replace(_plain(cell), rounds=rounds)
    links = book.best(plain)
    hosts = book.best(replace(plain, cluster=HOSTS))
    third = _third(hosts, cell)
    found: dict[str, Any] = {
        "figure": cell.figure,
        "network": cell.network,
        "Gbit/s": cell.gbit,
        "algorithm": cell.algorithm,
        "workers": cell.workers,
        "stage": cell.stage,
        "published": cell.published,
        "links": book.speed_up(links),
        "hosts": book.speed_up(hosts),
        "third": None if third is None else book.speed_up(third[0]),
        "with": None if third is None else third[1],
    }
    found["ratio, links"] = found["links"] / cell.published
    found["explained"] = ipdps_reasons.explained(found)
    found["ratio, explained"] = found["explained"] / cell.published
    return {**found, "reason": ipdps_reasons.reason(found)}


def _plain(cell: Cell) -> Run:
    """Return the run with the links alone and the smallest ratio of servers."""
    return Run(cell.network, cell.gbit, cell.algorithm, cell.workers, cell.stage)


def _third(run: Run, cell: Cell) -> tuple[Run, str] | None:
    """Return the run with the assumptions that only some runs need besides A, and their letters."""
    if cell.algorithm == "ad-psgd":
        return replace(run, extra=AVERAGING[cell.network]), "C"
    if cell.stage == "dgc":
        return replace(run, extra=SELECTION), "B"
    if (cell.stage, cell.network) == ("sharding", "resnet50") and cell.algorithm in ("asp", "ssp"):
        return replace(run, extra=PUSHING), "G"
    letters = ""
    # With one server the time per message matters; in one message ResNet-50 would have none.
    if cell.stage == "sharding" or (cell.stage, cell.network) == ("none", "vgg16"):
        run, letters = replace(run, bucket_mb=WHOLE_MB), letters + "D"
    if cell.network == "vgg16" and cell.algorithm in ("asp", "ssp") and cell.workers == 8:
        run, letters = replace(run, single=True), letters + "E"
    if cell.network == "vgg16" and cell.algorithm == "ssp":
        run, letters = replace(run, cluster={**HOSTS, **TAKING}), letters + "F"
    return (run, letters) if letters else None


def sensitivity(chosen: Iterable[Cell], book: Book, rounds: int) -> str:
    """Return how the links' speedups of figure 2 at 24 workers depend on the time of a step."""
    lines = []
    for cell in chosen:
        if cell.figure != 2 or cell.workers != 24 or cell.gbit != NETS[0]:
            continue
        run = book.best(replace(_plain(cell), rounds=rounds))
        values = [book.speed_up(replace(run, factor=factor)) for factor in (1.0, *FACTORS)]
        texts = " / ".join(f"{value:.2f}" for value in values)
        lines.append(f"- {NETWORKS[cell.network].name}, {cell.algorithm}: {texts}")
    if not lines:
        return ""
    heads = f"with the step's time, and with {FACTORS[0]:g} and {FACTORS[1]:g} times as much"
    return f"\n\nLinks alone, 10 Gbit/s, 24 workers, {heads}:\n\n" + "\n".join(lines)


def placement(book: Book, rounds: int) -> str:
    """Return the evidence that the containers of a machine share its link."""
    run = Run("resnet50", NETS[0], "asp", 24, rounds=rounds, cluster=HOSTS)
    shared = book.best(run)
    apart = replace(shared, cluster={**HOSTS, "hosts": 24 // VM})
    values = [book.speed_up(shared), book.speed_up(apart)]
    published = FIGURE_2["resnet50", NETS[0]]["asp"][24]
    return (
        "\n\nASP on ResNet-50, 24 workers at 10 Gbit/s, with A: "
        f"{values[0]:.2f} with a link for each machine, {values[1]:.2f} with one for each "
        f"container; published {published:g}."
    )


def _chosen(args: argparse.Namespace) -> list[Cell]:
    return [
        cell
        for cell in cells()
        if cell.figure in args.figure
        and cell.network in args.network
        and cell.gbit in args.gbit
        and cell.algorithm in args.algorithm
        and (args.workers is None or cell.workers in args.workers)
    ]


def _parser() -> argparse.ArgumentParser:
    parser = harness.make_parser("ipdps", "Simulate the speedups of the IPDPS 2021 study.")
    add = parser.add_argument
    add(
        "--figure", type=int, nargs="+", choices=(2, 4), default=[2, 4], help="figures of the study"
    )
    add(
        "--network",
        nargs="+",
        choices=list(NETWORKS),
        default=list(NETWORKS),
        help="networks to train",
    )
    add(
        "--algorithm",
        nargs="+",
        choices=ALGORITHMS,
        default=list(ALGORITHMS),
        help="algorithms to run",
    )
    add(
        "--gbit", type=int, nargs="+", choices=NETS, default=list(NETS), help="link rates in Gbit/s"
    )
    add("--workers", type=whole(), nargs="+", help="only cells with these numbers of workers")
    add(
        "--rounds",
        type=int,
        default=5,
        help="steps of each worker before the measured ones, and number of measured ones; at least "
        "3, which overestimate by up to 7 %% if a server is the bottleneck",
    )
    add("--sensitivity", action="store_true", help="also vary the time of a step")
    add(
        "--done",
        type=data_file,
        default=Path("runs/ipdps.jsonl"),
        metavar="FILE",
        help="finished runs of earlier calls of the same program; remove the file to start over",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = quick.parse(_parser(), argv, QUICK)
    if args.rounds < LEAST_ROUNDS:
        raise UserError(
            f"--rounds: expected at least {LEAST_ROUNDS}, because leases are two steps ahead, "
            f"got {args.rounds}; give {LEAST_ROUNDS} or more"
        )
    facts = machine()
    book, chosen = Book(args.done), _chosen(args)
    if not chosen:
        raise UserError(
            "--figure, --network, --algorithm, --gbit and --workers: no bar of the study matches "
            "all of them; leave one out"
        )
    rows = [measure(cell, book, args.rounds) for cell in chosen]
    notes = f"{ipdps_reasons.NOTES}\n\n{ipdps_reasons.summary(rows)}"
    if args.sensitivity:
        notes += sensitivity(chosen, book, args.rounds) + placement(book, args.rounds)
    title = "Speedups of the IPDPS 2021 study, simulated"
    found = harness.Findings(title, rows, notes, ipdps_reasons.unexplained(rows))
    status = harness.publish("ipdps", argv, args, facts, found)
    if args.save is not None:
        print(f"written: {' '.join(map(str, ipdps_plots.draw(rows, args.save)))}")
    return status


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
