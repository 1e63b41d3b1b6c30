"""Code shared by the scripts that reproduce a table: it runs their cells with the chosen engines.

Simulations are repeated at each start, which takes a second or two per cell. Finished MPI runs are
kept in the folder given by `--work` and reused by the next start.
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
"""... multiplied by this factor for an algorithm whose bar is a matter of percents, and for those
whose workers delay one another without rounds, which take half a minute to settle with VGG-16."""
FEWEST = 3
"""Smallest number of rounds of an algorithm in which all wait for the slowest."""
SETTLING = 20
"""Smallest number of steps of the fast workers for other algorithms, to settle and be measured."""
QUICK: Mapping[str, Any] = {"computing": 0.15 * COMPUTING, "workload": [next(iter(WORKLOADS))]}
"""Defaults of a reduced run: short cells of one network."""


@dataclass(frozen=True)
class Result:
    """A cell and its figures by engine; engines that were not requested are missing."""

    cell: Cell
    figures: Mapping[str, Mapping[str, Any]]

    @property
    def main(self) -> Mapping[str, Any]:
        """Return the figures of the MPI run, or else those of the simulation."""
        return self.figures.get("real") or self.figures["virtual"]

    @property
    def speed_up(self) -> float:
        """Return the main engine's speedup."""
        return float(self.main["speed-up"])

    @property
    def sent_alone(self) -> float:
        """Return the speedup by gradients that were not added to another before sending."""
        return self.speed_up * (1 - float(self.main["coalesced"]))

    @property
    def error(self) -> float | None:
        """Return the simulation's relative error against the MPI run; None: one is missing."""
        if len(self.figures) < 2 or not self.figures["real"]["speed-up"]:
            return None
        real = float(self.figures["real"]["speed-up"])
        return float(self.figures["virtual"]["speed-up"]) / real - 1


@dataclass(frozen=True)
class Script:
    """The definition of one table.

    Args:
        name: name of the script and of its result files.
        about: description for its help.
        add_options: adds this script's own options to a parser.
        title: the heading.
        notes: definitions of its columns, in Markdown.
        cells: returns all cells of a run for the command's arguments.
        row: returns a result's row.
        missed: returns one line for every bar that was missed.
        draw: plots all results into a PNG file.
        order: sorts the rows; by default they are in the order of the cells.
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
    """Run a script's command line and return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = harness.make_parser(script.name, script.about)
    add_options(parser)
    script.add_options(parser)
    return carry_out(script, quick.parse(parser, argv, {**QUICK, **script.reduced}), argv)


def carry_out(script: Script, args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run the script's cells, publish their table and return the exit status."""
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
    """Return a cell of the study's cluster: four hosts, with a server on each host in use.

    Args:
        workload: a key of `WORKLOADS`.
        computing: intended seconds of computing; see `iterations`.
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
    """Return a fast worker's steps in about ``computing`` seconds, or the algorithm's minimum."""
    seconds = WORKLOADS[workload].seconds
    computing *= LONGER.get(algorithm, 1.0)
    ahead = BOUNDED.get(algorithm, 0)
    if ahead or find_algorithm(algorithm).lockstep:
        # Workers that may run ahead do so first, and are measured only after that.
        fewest = ahead + TICKETS_AHEAD + FEWEST - 1 if ahead else FEWEST
        return max(fewest, round(computing / (seconds * slowdown)))
    return max(SETTLING, round(computing / seconds))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that these scripts share."""
    add = parser.add_argument
    add(
        "--engine",
        choices=ENGINES,
        nargs="+",
        help="engines that run the cells (default: all available)",
    )
    add("--work", type=folder, metavar="FOLDER", help="keep MPI runs here, and resume from them")
    add(
        "--computing",
        type=positive,
        default=COMPUTING,
        help="intended computing time of a cell in s",
    )
    add("--workload", choices=list(WORKLOADS), nargs="+", default=list(WORKLOADS), help="networks")
    add("--dry-run", action="store_true", help="only list the runs and their duration")


def engines(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the requested engines, or all that are available.

    Raises:
        UserError: the lab was requested and cannot be built.
    """
    reason = Lab.available()
    if args.engine is None:
        if reason:
            print(f"simulation only: {reason}", file=sys.stderr)
        return ENGINES if reason is None else ENGINES[:1]
    if "real" in args.engine and reason and not args.dry_run:
        raise UserError(f"--engine real: {reason}")
    return tuple(args.engine)


def run(
    cells: Sequence[Cell], names: Sequence[str], store: CellStore, facts: Machine
) -> list[Result]:
    """Run the cells on each engine; MPI runs in the store are reused."""
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
    """Sort cells by lab, the shortest first, so that mistakes show early."""
    return sorted(cells, key=lambda cell: (cell.hosts, cell.seconds))


def plan(cells: Sequence[Cell], store: CellStore) -> str:
    """Print the MPI runs to do, and their duration according to the simulation."""
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
    """Return the row of a result, after the script's own columns."""
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
Published: the study's figure. Virtual and real: the speedup in the simulation, computed from the
network's rate and latency alone, and over MPI in the network lab; error: the simulation's, relative
to real. The other columns are those of the real run if there is one. Coalesced: gradients that a
worker added to a waiting one, as a share of all; sent alone: the speedup by the others (all are
applied); dropped: gradients lost. Cores busy: cores of this machine in use by any process; stolen:
the largest share of its cores over ten seconds that its host withheld. A run with more than 5 % is
repeated, up to three times, and the one with the least counts. Iterations: of a worker that is not
slowed down."""


def origin(results: Sequence[Result], store: CellStore) -> str:
    """Return a sentence with the dates and commits of the MPI runs, or an empty text."""
    entries = [entry for result in results if (entry := store.get(result.cell)) is not None]
    if not entries or all("real" not in result.figures for result in results):
        return ""
    dates = sorted(str(entry["date"]) for entry in entries)
    commits = ", ".join(dict.fromkeys(str(entry["commit"]) for entry in entries))
    return f"Runs over MPI from {dates[0]} to {dates[-1]}, of commit {commits}."
