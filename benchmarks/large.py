"""Measure how far each algorithm scales: simulations with up to 1,024 workers.

    python -m benchmarks.large --save
    python -m benchmarks.large --quick

ResNet-50 and VGG-16 at full size with the step times of the ALADDIN study's cluster, eight workers
per host. Finished points are kept (`--points`); rerun the same command to resume. The results do
not depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

from aladdin_mpi.errors import UserError
from benchmarks import harness, quick
from benchmarks.bounds import data_file, positive, whole
from benchmarks.kept_lines import whole_lines
from benchmarks.machine import machine
from benchmarks.results import RESULTS, table
from benchmarks.scale import plots
from benchmarks.scale.cases import (
    JITTER,
    LINKS,
    LOCAL_GBIT,
    SERVERS,
    USUAL_LINK,
    USUAL_SERVERS,
    WORKERS,
    WORKERS_PER_HOST,
    WORKLOADS,
    Case,
    Curve,
    all_algorithms,
    curve,
    study,
)
from benchmarks.scale.measure import run_apart
from benchmarks.scale.prediction import KNEE
from benchmarks.scale.table import Found, between, row, servers, words

QUICK = {
    "workload": ["vgg16"],
    "algorithm": ["aladdin", "ar-sgd"],
    "workers": [8, 16, 32],
    "servers": [1],
    "link": [10.0],
}
STOP = 0.4
"""A curve that is only needed for its knee ends with the first point below this share."""
SETTLED_AT = 128
"""Numbers of workers of the runs that are repeated with twice as many steps, ..."""
SETTLED = ("aladdin", "asp", "ar-sgd", "sgp", "easgd")
"""... of these algorithms."""

NOTES = f"""\
Knee: the largest number of workers with at least {KNEE:.0%} of the ideal speedup, interpolated over
log2 of the workers. For `aladdin`, whose workers never wait, the same share of gradients must be
sent individually: when its links are saturated, it adds up gradients before sending, and all of
them are still applied. "<" and ">": before the first, or beyond the last number of workers.
Speed-up: steps per second of all workers, each over a window of steps after the start, times the
time of one step.

Predicted: from bytes and link rates alone, by the busiest host's link: overlapped, if all data
moves while workers compute; not overlapped, if none does. Both include the wait for the slowest
worker if all wait for it. `ashl` and `adsp` choose themselves how often they send.

Busiest link: the link that was busy for the largest share of the time, at the first number of
workers past the knee ("seen at"), or at the last. Its limit: "link is full" from 90 % on.

Model: {{hosts}} eight workers per host; a host's link has the given Gbit/s in each direction with a
latency of 50 us, and {LOCAL_GBIT:g} Gbit/s inside a host; servers are assigned to the hosts in
turn, at most one per host (with fewer hosts than servers there are fewer servers). Without servers,
neighbours share a host. Time of a step: log-normal, standard deviation {JITTER:.0%}. Long
all-reduces use a ring up to 32 ranks, and halving and doubling beyond. `multistep` stops at 128
workers, because its messages grow as their square. It exchanges gradients here, not activations.

Not modelled: the network between the hosts is one switch that is never the bottleneck, so there are
no oversubscribed upper layers, no hot spots and no congestion except at the hosts' own links; no
protocol effects, such as headers, slow start, incast losses and retransmissions; no contention with
a file system or other jobs; and no time for the servers' additions and copies, so a server is as
fast as its link."""


class Store:
    """Finished points, in memory and, if a file is given, as lines of JSON in it.

    A point is valid only for the options that it was run with (`Case.digest`). The file does not
    record changes to the program.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._found: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            for number, line in whole_lines(path):
                self._take(number, line)

    def _take(self, number: int, line: str) -> None:
        try:
            entry = json.loads(line)
            case = Case(**entry["case"])
            if entry["options"] == case.digest:
                self._found[_key(case)] = dict(entry["figures"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"--points: expected a line of JSON with case and figures in {self._path}, line "
                f"{number}, got {line[:60]!r}; remove that line to run its point again"
            ) from error

    def get(self, case: Case) -> dict[str, Any] | None:
        """Return the figures of a finished case."""
        return self._found.get(_key(case))

    def put(self, case: Case, figures: Mapping[str, Any]) -> None:
        """Store the figures of a case."""
        self._found[_key(case)] = dict(figures)
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        entry = {"case": asdict(case), "options": case.digest, "figures": figures}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def _key(case: Case) -> str:
    return json.dumps(asdict(case), sort_keys=True)


def run_missing(store: Store, cases: Iterable[Case], jobs: int) -> None:
    """Run the cases that are not stored, ``jobs`` at a time, and store each when it ends."""
    missing = [case for case in dict.fromkeys(cases) if store.get(case) is None]
    for case, found, seconds, memory in run_apart(missing, jobs):
        store.put(case, found)
        served = f", {servers(case.servers)}" if case.servers else ""
        print(
            f"{case.algorithm}, {case.model.name}, {case.gbit:g} Gbit/s{served}, {case.workers} "
            f"workers: {found['speed_up'] / case.workers:.1%} of ideal; {seconds:.0f} s, "
            f"{memory:.0f} MB",
            file=sys.stderr,
            flush=True,
        )


def run_all(store: Store, curves: Sequence[Curve], jobs: int) -> None:
    """Run missing points, small numbers of workers first; curves end after their knees."""
    for workers in sorted({number for line in curves for number in line.workers}):
        going_on = [line for line in curves if not is_over(store, line)]
        cases = [case for line in going_on for case in line.cases if case.workers == workers]
        run_missing(store, cases, jobs)


def is_over(store: Store, line: Curve) -> bool:
    """Return whether a curve that is only needed for its knee is complete."""
    usual = line.gbit == USUAL_LINK and line.servers in (0, USUAL_SERVERS)
    found = kept(store, [line])
    return not usual and bool(found) and found[0].judged[-1][1] < STOP


def settled(
    store: Store, workloads: Iterable[str], algorithms: Collection[str], jobs: int
) -> list[dict[str, Any]]:
    """Return the rows that show the effect of twice as many steps."""
    lines = [
        curve(name, workload, USUAL_LINK, USUAL_SERVERS, [SETTLED_AT])
        for workload in workloads
        for name in filter(algorithms.__contains__, SETTLED)
    ]
    pairs = [(case, replace(case, times=2)) for line in lines for case in line.cases]
    run_missing(store, chain.from_iterable(pairs), jobs)
    rows = []
    for pair in pairs:
        once, twice = (found["speed_up"] for case in pair if (found := store.get(case)) is not None)
        rows.append(
            {
                "model": pair[0].model.name,
                "algorithm": pair[0].algorithm,
                "workers": SETTLED_AT,
                "speed-up": once,
                "with twice the steps": twice,
                "change": f"{twice / once - 1:+.1%}",
            }
        )
    return rows


def notes(founds: Sequence[Found], checked: Sequence[Mapping[str, Any]]) -> str:
    """Return the notes: columns, what moves the knees, and the effect of twice as many steps."""
    models = ", ".join(
        f"{w.name} of {w.megabytes:g} MB with {w.seconds:g} s for a step of {w.batch} samples"
        for w in WORKLOADS.values()
    )
    moved = words(founds)
    parts = [NOTES.format(hosts=f"{models};"), between(founds) + "."]
    if moved:
        parts.append("What moves the knees:\n\n" + "\n".join(f"- {line}" for line in moved))
    if checked:
        parts.append("Twice as many steps:\n\n" + table(checked))
    return "\n\n".join(parts)


def _parser() -> argparse.ArgumentParser:
    parser = harness.make_parser("large", "Simulate how far each algorithm scales.")
    add = parser.add_argument
    add("--workload", choices=list(WORKLOADS), nargs="+", default=list(WORKLOADS), help="models")
    add("--algorithm", choices=all_algorithms(), nargs="+", default=all_algorithms(), help="curves")
    add(
        "--workers",
        type=whole(),
        nargs="+",
        default=list(WORKERS),
        help="numbers of workers, the points of each curve",
    )
    add(
        "--servers",
        type=whole(),
        nargs="+",
        default=list(SERVERS),
        help="algorithms, one curve each",
    )
    add(
        "--link",
        type=positive,
        nargs="+",
        default=list(LINKS),
        help="link rates in Gbit/s, one curve each",
    )
    add(
        "--points",
        type=data_file,
        metavar="FILE",
        help="file of finished points, which are reused; by default large/points.jsonl in the "
        "folder of the results, with --quick none",
    )
    add("--jobs", type=whole(), default=2, help="number of points at the same time")
    add(
        "--kept-only",
        action="store_true",
        help="show the points in --points without running anything",
    )
    return parser


def _chosen(args: argparse.Namespace) -> list[Curve]:
    for workers in args.workers:
        if workers < WORKERS_PER_HOST or workers % WORKERS_PER_HOST:
            raise UserError(
                f"--workers: expected multiples of {WORKERS_PER_HOST}, which share a host, got "
                f"{workers}; write for example --workers 8 64 512"
            )
    return study(args.workload, args.workers, args.algorithm, args.servers, args.link)


def _place(args: argparse.Namespace) -> Path | None:
    """Return the file of points; a quick run has none unless it is given."""
    if args.points is not None or args.quick:
        return args.points
    return (args.save or RESULTS) / "large" / "points.jsonl"


def kept(store: Store, curves: Iterable[Curve]) -> list[Found]:
    """Return the curves with stored points, as far as they go."""
    founds = []
    for line in curves:
        points = [(case.workers, store.get(case)) for case in line.cases]
        there = [(workers, known) for workers, known in points if known is not None]
        if there:
            founds.append(Found(line, there))
    return founds


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = quick.parse(_parser(), argv, QUICK)
    curves = _chosen(args)
    facts = machine()
    if args.kept_only and _place(args) is None:
        raise UserError("--kept-only with --quick requires --points FILE")
    store = Store(_place(args))
    if not args.kept_only:
        run_all(store, curves, args.jobs)
    founds = kept(store, curves)
    if not founds:
        raise UserError(f"--points: expected finished points in {_place(args)}, got none; run some")
    checked: list[dict[str, Any]] = []
    if SETTLED_AT in args.workers and not args.kept_only:
        checked = settled(store, args.workload, args.algorithm, args.jobs)
    title = f"How far the algorithms scale: up to {max(f.points[-1][0] for f in founds)} workers"
    found = harness.Findings(title, [row(each) for each in founds], notes(founds, checked))
    status = harness.publish("large", argv, args, facts, found)
    if args.save is not None:
        pictures = plots.draw(founds, args.save / "large")
        print(f"drawn: {' '.join(map(str, pictures))}")
    return status


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
