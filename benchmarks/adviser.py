"""Check the adviser's recommendations with MPI runs in ten set-ups of the network lab.

    python -m benchmarks.adviser --dry-run
    python -m benchmarks.adviser --work runs/adviser --check --save
    python -m benchmarks.adviser --only 6 --check
    python -m benchmarks.adviser --quick

A random seed determines the set-ups. In each, some of the adviser's candidates run over MPI: the
first two of its ranking by samples per second, the best of other algorithms, and `bsp` with one
server, which always has a bottleneck. Two of those with a bottleneck run again with twice the
capacity there. With `--work`, rerun the same command to resume. Requires the network lab and root.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from aladdin_mpi.advice import bottleneck, candidates, timed_run
from aladdin_mpi.advice.candidate_search import LONG, CandidateResult, CandidateSearch
from aladdin_mpi.advice.candidates import Candidate, ClusterTraits, ground
from aladdin_mpi.advice.learning import SampleEfficiency
from aladdin_mpi.advice.options import AdviceRequest, AdviseOptions
from aladdin_mpi.advice.timed_run import rate_of
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.options.run import SimulateOptions
from aladdin_mpi.options.toml_file import parse_part
from aladdin_mpi.process.files import write_whole
from benchmarks import harness
from benchmarks.bounds import folder, whole
from benchmarks.engines import GOODPUT, LINKS
from benchmarks.lab import Lab
from benchmarks.machine import machine

NAME = "adviser"
SEED = 7
SETUPS = 10
BATCH = 4
STEPS = 20
STEP = 0.4
"""Seconds."""
JITTER = 0.013
BEST, PREDICTED, ALL, RELIEF = 0.05, 0.05, 0.10, 0.10
"""Largest errors: recommended against fastest rate, prediction of the recommended candidate's rate,
of all rates, and of the gain from removing the bottleneck."""
ENOUGH = 9
"""Number of set-ups in which the recommended candidate must be near the fastest."""
TRIED = 4
"""Number of candidates per set-up that run over MPI, in addition to the plain one."""
PLAIN = Candidate("bsp", 1, False)
HELD = 2
"""Number of candidates per set-up whose bottleneck is removed."""
NAMES = ("aladdin", "aladdin-ahead", "ar-sgd", "asp", "bsp", "sgp")
LIMIT = 300.0

NOTES = f"""\
Each row is a candidate of a set-up: the samples/s that the adviser predicted, and those over MPI in
the network lab. Seed {SEED} determines the set-ups: hosts, workers, link rates (a host may have a
slower one), one slow worker or none, the size of the model. Steps take {STEP} s, modelled.
Samples/s is the slope of the metrics lines from two fifths of the samples on, in both cases.
Recommended: the first of the adviser's ranking by samples/s (`--target time`). The network is
described as in `benchmarks.agreement`. Of the fastest: the rate divided by that of the fastest
candidate that was run. Relieved: the candidate's speedup over MPI if the capacity of the bottleneck
that the adviser named is doubled (a slow worker: as fast as the others). Expected: the adviser's
prediction of it."""


@dataclass(frozen=True)
class Setup:
    """A cluster of the lab and a model."""

    number: int
    hosts: int
    workers: int
    links: tuple[float, ...]
    """Link rate of each host in Gbit/s."""
    slowdown: tuple[tuple[int, float], ...]
    megabytes: float

    def describe(self) -> str:
        """Return a short description."""
        rates = " ".join(f"{rate:g}" for rate in self.links)
        slow = "".join(f", worker {w} {f:g}x slower" for w, f in self.slowdown)
        return f"{self.workers} workers, links {rates} Gbit/s, {self.megabytes:g} MB{slow}"


def setups(count: int) -> list[Setup]:
    """Return the set-ups that the seed determines."""
    draw = random.Random(SEED)
    found = []
    for number in range(count):
        hosts = draw.choice([2, 3, 4, 5])
        workers = draw.choice([5, 7, 8])
        rate = draw.choice([0.1, 1.0])
        links = [rate] * hosts
        if draw.random() < 0.5:
            links[draw.randrange(hosts)] = rate / draw.choice([2, 4])
        slow = [(draw.randrange(workers), draw.choice([2.0, 4.0]))] if draw.random() < 0.5 else []
        megabytes = draw.choice([1.0, 4.0]) if rate < 1 else draw.choice([4.0, 20.0])
        found.append(Setup(number, hosts, workers, tuple(links), tuple(slow), megabytes))
    return found


def request_for(
    setup: Setup, links: Sequence[float] | None = None, seconds: float = 300
) -> AdviceRequest:
    """Return the request to the adviser for a set-up."""
    rates = list(setup.links)
    goodput = GOODPUT
    usual = max(set(rates), key=rates.count)
    lines = [
        f"hosts = {setup.hosts}",
        f"workers = {setup.workers}",
        'placement = "workers"',
        f"bandwidth-gbit = {usual * goodput}",
        f"compute-time = {STEP}",
        f"jitter = {JITTER}",
        *(f"{name.removeprefix('--')} = {json.dumps(value)}" for name, value in LINKS.items()),
        "[links]",
        *(f"{h} = {rate * goodput}" for h, rate in enumerate(rates) if rate != usual),
        "[slowdown]",
        *(f"{worker} = {factor}" for worker, factor in setup.slowdown),
    ]
    settings = parse_part(SimulateOptions, "cluster", "\n".join(lines), "set-up")
    options = AdviseOptions(
        model=f"size:{setup.megabytes}", batch_size=BATCH, target="time", algorithms=NAMES,
        seconds=300,
        quiet=True,
    )  # fmt: skip
    return AdviceRequest(options, settings, "set-up", ())


def advised(setup: Setup) -> tuple[CandidateSearch, list[CandidateResult], ClusterTraits]:
    """Return the adviser's ranking."""
    request = request_for(setup)
    on = ground(request, setup.megabytes)
    race = CandidateSearch(
        request, on, request.options.model, lambda c: SampleEfficiency(1.0), lambda *_: None
    )
    return race, race.run(candidates.names(NAMES, on.workers)), on


# -- over MPI ---------------------------------------------------------------------------
def host_of(setup: Setup, candidate: Candidate) -> list[int]:
    """Return the host of each rank."""
    servers = [s % setup.hosts if candidate.spread else 0 for s in range(candidate.servers)]
    each = -(-setup.workers // setup.hosts)
    return [*servers, *(worker // each for worker in range(setup.workers))]


def measured(setup: Setup, candidate: Candidate, links: Sequence[float]) -> float:
    """Return the samples per second over MPI.

    Raises:
        UserError: the run failed.
    """
    samples = BATCH * setup.workers * STEPS
    words: dict[str, Any] = {
        "--compute": "timed",
        "--compute-time": STEP,
        "--jitter": JITTER,
        "--model": f"size:{setup.megabytes}",
        "--batch-size": BATCH,
        "--samples": samples,
        "--log-every": BATCH * setup.workers // 2,
        **(
            {"--slowdown": ",".join(f"{w}={f}" for w, f in setup.slowdown)}
            if setup.slowdown
            else {}
        ),
    }
    flat = [str(word) for pair in words.items() for word in pair]
    with tempfile.TemporaryDirectory() as where, Lab(setup.hosts, max(links)) as lab:
        for host, rate in enumerate(links):
            lab.limit_rate(host, rate)
        run = Path(where) / "run"
        args = [
            "-m",
            "aladdin_mpi.train",
            *candidate.words,
            *flat,
            "--run-dir",
            str(run),
            "--quiet",
        ]
        done = lab.run(host_of(setup, candidate), args, timeout=LIMIT)
        if done.returncode != 0:
            raise UserError(f"{setup.describe()}, {candidate.key}: {done.stdout}{done.stderr}")
        summary = json.loads((run / "summary.json").read_text())
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return rate_of(lines, summary)


class Kept:
    """Measured rates, kept in a file."""

    def __init__(self, where: Path | None) -> None:
        self._path = None if where is None else where / f"{NAME}.json"
        there = self._path is not None and self._path.exists()
        self._rates: dict[str, float] = json.loads(self._path.read_text()) if there else {}  # type: ignore[union-attr]

    def rate(self, setup: Setup, candidate: Candidate, links: Sequence[float]) -> float:
        """Return a candidate's rate; measure it if it is not in the file."""
        key = json.dumps([asdict(setup), candidate.key, candidate.spread, list(links)])
        if key not in self._rates:
            print(f"set-up {setup.number}: {candidate.describe()}", file=sys.stderr, flush=True)
            self._rates[key] = measured(setup, candidate, links)
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(self._path, json.dumps(self._rates, indent=1))
        return self._rates[key]


def chosen(race: CandidateSearch, entries: Sequence[CandidateResult]) -> list[CandidateResult]:
    """Return the first of the ranking, the best of other algorithms, and the plain candidate."""
    known = [entry for entry in entries if entry.timed is not None]
    first = known[:2]
    for entry in known[2:]:
        if entry.candidate.algorithm not in {each.candidate.algorithm for each in first}:
            first.append(entry)
    found = first[:TRIED]
    if all(entry.candidate != PLAIN for entry in found):
        timed = timed_run.run(race.options(PLAIN, LONG).model_dump(mode="json"))
        assert not isinstance(timed, str), timed
        found.append(CandidateResult(PLAIN, inf, SampleEfficiency(1.0), long=[timed]))
    return found


def rows_of(setup: Setup, kept: Kept) -> list[dict[str, Any]]:
    """Return the table's rows for a set-up."""
    race, entries, on = advised(setup)
    tried = chosen(race, entries)
    rates = [kept.rate(setup, entry.candidate, setup.links) for entry in tried]
    rows, held = [], 0
    for entry, rate in zip(tried, rates, strict=True):
        assert entry.timed is not None
        found = bottleneck.find(entry.candidate, entry.timed, on, race.options(entry.candidate, 1))
        expected = relieved = None
        if found.relief and held < HELD:
            held += 1
            expected, relieved = relief(setup, race, entry, found, rate, kept)
        rows.append(
            {
                "set-up": f"{setup.number}: {setup.describe()}" if entry is tried[0] else "",
                "candidate": entry.candidate.describe(),
                "predicted": entry.rate,
                "real": rate,
                "error": entry.rate / rate - 1,
                "of the fastest": rate / max(rates),
                "bottleneck": found.text,
                "expected": expected,
                "relieved": relieved,
            }
        )
    return rows


def relief(
    setup: Setup,
    race: CandidateSearch,
    entry: CandidateResult,
    found: bottleneck.Bottleneck,
    before: float,
    kept: Kept,
) -> tuple[float | None, float | None]:
    """Return the speedup with the bottleneck removed: predicted, and measured over MPI."""
    fields = found.relief
    predicted = race.try_out({"relieved": (entry.candidate, request_for(setup).on(fields))})
    rate = predicted["relieved"]
    expected = None if isinstance(rate, str) else rate / entry.rate
    widened = replace(setup, slowdown=_slowdown(setup, fields))
    links = _links(setup, race.options(entry.candidate, 1).cluster, fields)
    return expected, kept.rate(widened, entry.candidate, links) / before


def _slowdown(setup: Setup, fields: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    return tuple(fields["slowdown"].items()) if "slowdown" in fields else setup.slowdown


def _links(setup: Setup, cluster: Cluster, fields: Mapping[str, Any]) -> list[float]:
    """Return the lab's link rates, with those doubled that the changed simulation widens."""
    if "cluster.bandwidth_gbit" in fields:
        return [2 * rate for rate in setup.links]
    wider = fields.get("cluster.links", {})
    return [
        2 * rate if wider.get(host, 0.0) > 1.5 * cluster.link_gbit(host) else rate
        for host, rate in enumerate(setup.links)
    ]


def missed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a description of each bar that was missed."""
    firsts = [row for row in rows if row["set-up"]]
    near = [row for row in firsts if row["of the fastest"] >= 1 - BEST]
    found = []
    if len(near) < min(ENOUGH, len(firsts)):
        found.append(f"near the fastest in {len(near)} of {len(firsts)}, expected {ENOUGH}")
    for row in firsts:
        if abs(row["error"]) > PREDICTED:
            found.append(f"{row['set-up']}: recommended predicted {row['error']:+.1%} off")
    for row in rows:
        if not row["set-up"] and abs(row["error"]) > ALL:
            found.append(f"{row['candidate']}: predicted {row['error']:+.1%} off")
        if row["expected"] and abs(row["relieved"] / row["expected"] - 1) > RELIEF:
            found.append(
                f"{row['candidate']}: {row['relieved']:.2f} times as fast with {row['bottleneck']} "
                f"widened, expected {row['expected']:.2f}"
            )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = harness.make_parser(
        NAME, "Check whether the adviser recommends the fastest candidate."
    )
    add = parser.add_argument
    add("--work", type=folder, metavar="FOLDER", help="keep MPI runs here, and resume from them")
    add("--setups", type=whole(1), default=SETUPS, help="number of set-ups")
    add("--only", type=whole(0), nargs="+", metavar="NUMBER", help="run only these set-ups")
    add("--dry-run", action="store_true", help="only list the set-ups")
    add("--quick", action="store_true", help="run one set-up")
    args = parser.parse_args(argv)
    asked = setups(1 if args.quick else args.setups)
    if args.only is not None:
        asked = [setup for setup in asked if setup.number in args.only]
    if args.dry_run:
        print("\n".join(f"{setup.number}: {setup.describe()}" for setup in asked))
        return 0
    reason = Lab.available()
    if reason:
        raise UserError(reason)
    facts, kept = machine(), Kept(args.work)
    rows = [row for setup in asked for row in rows_of(setup, kept)]
    title = "The adviser's recommendations against MPI runs in the network lab"
    findings = harness.Findings(title, rows, NOTES, missed(rows))
    return harness.publish(NAME, argv, args, facts, findings)


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
