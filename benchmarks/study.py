"""What the scripts share that reproduce a table: their cells, run by the engines asked for.

Virtual time is computed anew at each start, which takes a second or two for a cell. Runs over MPI
are kept in the folder given by `--work` as they end, and a second start goes on behind them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import find_algorithm
from benchmarks import harness, quick
from benchmarks.bounds import folder, positive
from benchmarks.cell_store import CellStore
from benchmarks.cells import BOUNDED, TICKETS_AHEAD, WORKLOADS, Cell
from benchmarks.engines import START_SECONDS, Engine, LabEngine, VirtualEngine
from benchmarks.lab import Lab
from benchmarks.machine import Machine, machine

WORKERS = 8
HOSTS = 4
RATE_GBIT = 1.0
ENGINES = ("virtual", "real")
COMPUTING = 17.0
"""Seconds of computing that a cell aims for, ..."""
LONGER = {
    "aladdin": 3.0,
    "aladdin-ahead": 3.0,
    "asp": 2.5,
    "ssp": 2.5,
    "easgd": 2.5,
    "ad-psgd": 2.5,
}
"""... or so many times as many, for an algorithm whose bar is a matter of percents, and for those
whose workers hold up one another without rounds: with VGG-16 they take half a minute to settle."""
FEWEST = 3
"""Rounds of an algorithm in which all wait for the slowest."""
SETTLING = 20
"""Steps of the fast workers that the others need, to settle and be counted."""
QUICK: Mapping[str, Any] = {"computing": 0.15 * COMPUTING, "workload": [next(iter(WORKLOADS))]}
"""A reduced pass: short cells of one network."""


@dataclass(frozen=True)
class Result:
    """A cell and its figures, by engine; an engine that was not asked for is missing."""

    cell: Cell
    figures: Mapping[str, Mapping[str, Any]]

    @property
    def main(self) -> Mapping[str, Any]:
        """The figures of the run over MPI, or else those of virtual time."""
        return self.figures.get("real") or self.figures["virtual"]

    @property
    def speed_up(self) -> float:
        """Of the main engine."""
        return float(self.main["speed-up"])

    @property
    def sent_alone(self) -> float:
        """The speed-up by gradients that were not added to another before they were sent."""
        return self.speed_up * (1 - float(self.main["coalesced"]))

    @property
    def error(self) -> float | None:
        """How far virtual time is above the run over MPI, as a share of it; None: not both."""
        if len(self.figures) < 2 or not self.figures["real"]["speed-up"]:
            return None
        real = float(self.figures["real"]["speed-up"])
        return float(self.figures["virtual"]["speed-up"]) / real - 1


@dataclass(frozen=True)
class Script:
    """What one table is made of.

    Args:
        name: of the script, and of its files of results.
        about: what it does, in a line of its help.
        add_options: to a parser, those that only this script has.
        title: the heading.
        notes: how its columns are defined, in Markdown.
        cells: all cells of a pass, by the command's arguments.
        row: of a result.
        missed: one line for every bar that was not reached.
        draw: writes the picture of all results into a PNG file.
        order: of the rows; by default that of the cells.
        reduced: the script's own defaults with `--quick`, by name.
    """

    name: str
    about: str
    add_options: Callable[[argparse.ArgumentParser], None]
    title: str
    notes: str
    cells: Callable[[argparse.Namespace], list[Cell]]
    row: Callable[[Result], dict[str, Any]]
    missed: Callable[[Sequence[Result]], list[str]]
    draw: Callable[[Sequence[Result], Path], None]
    order: Callable[[Sequence[Result]], Sequence[Result]] = list
    reduced: Mapping[str, Any] = field(default_factory=dict)


def main(script: Script, argv: Sequence[str] | None) -> int:
    """A script's command line; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = harness.make_parser(script.name, script.about)
    add_options(parser)
    script.add_options(parser)
    return carry_out(script, quick.parse(parser, argv, {**QUICK, **script.reduced}), argv)


def carry_out(script: Script, args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run the script's cells and publish their table; returns the exit status."""
    cells, store = script.cells(args), CellStore(args.work)
    if args.dry_run:
        print(plan(cells, store))
        return 0
    facts = machine()
    results = script.order(run(cells, engines(args), store, facts))
    notes = "\n\n".join(filter(None, [script.notes, origin(results, store)]))
    table = [script.row(result) for result in results]
    found = harness.Findings(script.title, table, notes, script.missed(results))
    status = harness.publish(script.name, argv, args, facts, found)
    if args.save is not None:
        script.draw(results, args.save / f"{script.name}.png")
    return status


def cell(
    workload: str,
    algorithm: str,
    slowdown: float,
    workers: int,
    computing: float,
    extra: tuple[str, ...] = (),
) -> Cell:
    """A cell of the study's cluster: four hosts, a server on each that is in use.

    Args:
        workload: a name of `WORKLOADS`.
        computing: seconds that it aims for; see `iterations`.
    """
    hosts = min(HOSTS, workers)
    return Cell(
        WORKLOADS[workload],
        algorithm,
        slowdown,
        workers,
        hosts if find_algorithm(algorithm).has_servers else 0,
        hosts,
        RATE_GBIT,
        iterations(workload, algorithm, slowdown, computing),
        extra,
        ("--ar-sgd-allreduce", "horovod") if algorithm == "ar-sgd" else (),
    )


def iterations(workload: str, algorithm: str, slowdown: float, computing: float) -> int:
    """Steps of a fast worker in about ``computing`` seconds, within what an algorithm needs."""
    seconds = WORKLOADS[workload].seconds
    computing *= LONGER.get(algorithm, 1.0)
    ahead = BOUNDED.get(algorithm, 0)
    if ahead or find_algorithm(algorithm).lockstep:
        # Who may run ahead does so first, and is counted only behind that.
        fewest = ahead + TICKETS_AHEAD + FEWEST - 1 if ahead else FEWEST
        return max(fewest, round(computing / (seconds * slowdown)))
    return max(SETTLING, round(computing / seconds))


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that these scripts have in common."""
    add = parser.add_argument
    add("--engine", choices=ENGINES, nargs="+", help="what runs the cells (default: all there are)")
    add(
        "--work", type=folder, metavar="FOLDER", help="keep runs over MPI here, and go on from them"
    )
    add(
        "--computing", type=positive, default=COMPUTING, help="of a cell, in s, as far as it may be"
    )
    add("--workload", choices=list(WORKLOADS), nargs="+", default=list(WORKLOADS), help="networks")
    add("--dry-run", action="store_true", help="say what would be run and for how long, no more")


def engines(args: argparse.Namespace) -> tuple[str, ...]:
    """Those asked for, or all that there are here.

    Raises:
        UserError: the lab was asked for and cannot be built.
    """
    reason = Lab.available()
    if args.engine is None:
        if reason:
            print(f"virtual time only: {reason}", file=sys.stderr)
        return ENGINES if reason is None else ENGINES[:1]
    if "real" in args.engine and reason and not args.dry_run:
        raise UserError(f"--engine real: {reason}")
    return tuple(args.engine)


def run(
    cells: Sequence[Cell], names: Sequence[str], store: CellStore, facts: Machine
) -> list[Result]:
    """Run the cells on each engine; those in the store are not run over MPI again."""
    cells = list(dict.fromkeys(cells))
    found: dict[Cell, dict[str, Mapping[str, Any]]] = {cell: {} for cell in cells}
    if "virtual" in names:
        for cell, figures in _all(VirtualEngine(), cells):
            found[cell]["virtual"] = figures
    if "real" in names:
        left = [cell for cell in cells if store.get(cell) is None]
        for cell, figures in _all(LabEngine(), _by_lab(left)):
            store.put(cell, figures, facts.get("commit"))
        for cell in cells:
            entry = store.get(cell)
            assert entry is not None
            found[cell]["real"] = entry["figures"]
    return [Result(cell, figures) for cell, figures in found.items()]


def _all(engine: Engine, cells: Sequence[Cell]) -> Iterable[tuple[Cell, dict[str, Any]]]:
    with engine:
        for number, cell in enumerate(cells, start=1):
            print(f"{engine.name} {number}/{len(cells)}: {cell.describe()}", file=sys.stderr)
            yield cell, engine.run(cell)


def _by_lab(cells: Sequence[Cell]) -> list[Cell]:
    """Those of one lab together; the shortest first, so that mistakes come out soon."""
    return sorted(cells, key=lambda cell: (cell.hosts, cell.seconds))


def plan(cells: Sequence[Cell], store: CellStore) -> str:
    """What a pass over MPI would run, and for how long by virtual time."""
    lines, total = [], 0.0
    for cell in _by_lab(list(dict.fromkeys(cells))):
        if store.get(cell) is not None:
            lines.append(f"    done  {cell.describe()}")
            continue
        seconds = START_SECONDS + float(VirtualEngine().run(cell)["seconds"])
        total += seconds
        lines.append(f"{seconds:7.0f}s  {cell.describe()}, {cell.iterations} iterations")
    return "\n".join([*lines, f"{total:7.0f}s  in all: {total / 60:.0f} minutes"])


def columns(result: Result, published: float | None) -> dict[str, Any]:
    """The row of a result, behind what the script puts first."""
    cell, main = result.cell, result.main
    return {
        "ideal": cell.ideal,
        "published": published,
        **{name: figures["speed-up"] for name, figures in result.figures.items()},
        "error": result.error,
        "of ideal": result.speed_up / cell.ideal,
        "whole run": main["whole run"],
        "wait fraction": main["wait fraction"],
        "coalesced": main["coalesced"],
        "sent alone": result.sent_alone,
        "dropped": main["dropped"],
        "sent by a step, MB": main["sent by a step, MB"],
        "cores busy": main.get("cores busy"),
        "stolen": main.get("stolen"),
        "iterations": cell.iterations,
        "seconds": main["seconds"],
    }


COLUMN_NOTES = """\
Published: the study's figure. Virtual and real: the speed-up in virtual time, computed from the
network's rate and latency alone, and over MPI in the network lab; error: of virtual time, as a
share of real. The other columns are those of the real run where there is one. Coalesced: gradients
that a worker added to a waiting one, as a share of all; sent alone: the speed-up by the others, and
all are applied; dropped: gradients lost. Cores busy: of
this machine, by whatever ran on it; stolen: the largest share of its cores over ten seconds that
its own host kept from it. A run with more than 5 % is made again, up to three times, and the one
with the least counts. Iterations: of a worker that is not slowed down."""


def origin(results: Sequence[Result], store: CellStore) -> str:
    """When the runs over MPI took place, and of which program, in a sentence; or nothing."""
    entries = [entry for result in results if (entry := store.get(result.cell)) is not None]
    if not entries or all("real" not in result.figures for result in results):
        return ""
    dates = sorted(str(entry["date"]) for entry in entries)
    commits = ", ".join(dict.fromkeys(str(entry["commit"]) for entry in entries))
    return f"Runs over MPI from {dates[0]} to {dates[-1]}, of commit {commits}."
