"""Measure throughput with `mpirun --with-ft ulfm`: the overhead, and the effect of a failure.

    python -m benchmarks.ulfm --check --save
    python -m benchmarks.ulfm --failure --runs 3 --check --save
    python -m benchmarks.ulfm --quick

Without `--failure`, no rank fails; the two runs of a pair, with and without ULFM, follow each
other, in alternating order. Steps are the smallest possible, and those of ResNet-20 at CIFAR-10's
size. With `--failure`, the last rank is killed in the middle of a run of digits, once with a few
ranks and once with several times as many as cores. All ranks are on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import ALGORITHMS
from benchmarks import harness
from benchmarks.bounds import whole
from benchmarks.machine import machine

NAME = "ulfm"
BAR = 0.95
"""Smallest share of the throughput without ULFM."""
LIMIT = 200.0
ULFM = ("--with-ft", "ulfm")

NOTES = f"""\
Samples/s: the median over the pairs of runs. Share: of the throughput without ULFM, the median over
the pairs, with the smallest and the largest. Expected: at least {BAR}."""

RANKS, CROWD = 5, 11
"""Numbers of ranks of a run with a failure."""
BARS = {RANKS: 0.9, CROWD: 0.5}
"""Smallest share of the throughput per core before the failure."""
BEFORE, AFTER = (0.12, 0.5), (0.6, 0.98)
"""The parts of a run's samples in which its throughput is measured; the failure is between them."""
EPOCHS = 40.0
EPOCH = 1437

FAILURE_NOTES = f"""\
Samples/s before and after the failure of the last rank, a worker, in the middle of the run. Share:
of the throughput per core before it, the median over the runs, with the smallest and the largest;
with {CROWD} ranks there are a third as many runs. The cores in use are at most as many as the
ranks. Expected: at least {BARS[RANKS]} with {RANKS} ranks, and {BARS[CROWD]} with {CROWD}."""


@dataclass(frozen=True)
class Case:
    """A training that is run with and without ULFM."""

    name: str
    ranks: int
    options: tuple[str, ...]
    epochs: float


CASES = (
    Case("aladdin-ahead, digits", 5, ("--algorithm", "aladdin-ahead"), 60),
    Case("aladdin, digits", 5, ("--algorithm", "aladdin"), 60),
    Case("ar-sgd, digits", 4, ("--algorithm", "ar-sgd"), 60),
    Case(
        "aladdin, ResNet-20",
        3,
        ("--algorithm", "aladdin", "--model", "resnet20", "--dataset", "synthetic:3x32x32:10:640"),
        2,
    ),
)


def samples_per_second(case: Case, survives: bool, epochs: float) -> float:
    """Return the throughput of one run.

    Raises:
        UserError: the run failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        words = [*case.options, "--epochs", str(epochs), "--eval-every", "0", "--quiet"]
        args = ["-m", "aladdin_mpi.train", *words, "--run-dir", str(run)]
        done = harness.run_here(case.ranks, args, LIMIT, ULFM if survives else ())
        if done.returncode != 0:
            raise UserError(f"{case.name}: {done.stdout}{done.stderr}")
        return float(json.loads((run / "summary.json").read_text())["samples_per_second"])


def row(case: Case, pairs: int, shorter: float) -> dict[str, Any]:
    """Return a row of the table."""
    found = []
    for turn in range(pairs):
        order = (False, True) if turn % 2 else (True, False)
        rates = {s: samples_per_second(case, s, case.epochs * shorter) for s in order}
        found.append((rates[False], rates[True]))
        print(f"{case.name}: {rates[True] / rates[False]:.3f}", file=sys.stderr, flush=True)
    shares = [survives / not_ for not_, survives in found]
    return {
        "training": case.name,
        "ranks": case.ranks,
        "without, samples/s": median(rate for rate, _ in found),
        "with, samples/s": median(rate for _, rate in found),
        "share": median(shares),
        "least": min(shares),
        "largest": max(shares),
    }


def rates_around_failure(algorithm: str, ranks: int, epochs: float) -> tuple[float, float]:
    """Return the throughput of one run before and after its last rank fails, in samples/s.

    Raises:
        UserError: the run failed.
    """
    samples = int(EPOCH * epochs)
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "run" / "metrics.jsonl"
        options = {
            "--algorithm": algorithm,
            "--samples": samples,
            "--log-every": max(1, samples // 40),
            "--eval-every": 0,
            "--run-dir": metrics.parent,
        }
        words = [str(word) for pair in options.items() for word in pair]
        program = ["-m", "benchmarks.programs.failing", str(ranks - 1), str(samples // 2)]
        args = [*program, str(metrics), "--", *words, "--quiet"]
        try:
            done = harness.run_here(ranks, args, LIMIT, ULFM)
        except subprocess.TimeoutExpired as error:
            raise UserError(f"{algorithm}, {ranks} ranks: a run took over {LIMIT:g} s") from error
        if done.returncode != 0:
            raise UserError(f"{algorithm}, {ranks} ranks: {done.stdout}{done.stderr}")
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return rate(lines, samples, BEFORE), rate(lines, samples, AFTER)


def rate(lines: Sequence[Mapping[str, Any]], samples: int, part: tuple[float, float]) -> float:
    """Return the throughput in one part of a run of ``samples``, in samples/s."""
    first, last = part[0] * samples, part[1] * samples
    within = [
        line for line in lines if line["kind"] == "train" and first <= line["samples"] <= last
    ]
    passed = within[-1]["samples"] - within[0]["samples"]
    return float(passed / (within[-1]["seconds"] - within[0]["seconds"]))


def failure_row(algorithm: str, ranks: int, runs: int, epochs: float) -> dict[str, Any]:
    """Return a row of the table of failures."""
    cores = os.cpu_count() or 1
    fewer = min(cores, ranks - 1) / min(cores, ranks)
    found = [rates_around_failure(algorithm, ranks, epochs) for _ in range(runs)]
    shares = [after / before / fewer for before, after in found]
    print(f"{algorithm}, {ranks} ranks: {median(shares):.2f}", file=sys.stderr, flush=True)
    return {
        "algorithm": algorithm,
        "ranks": ranks,
        "before, samples/s": median(before for before, _ in found),
        "after, samples/s": median(after for _, after in found),
        "share": median(shares),
        "least": min(shares),
        "largest": max(shares),
    }


def failures(args: argparse.Namespace) -> harness.Findings:
    """Run the trainings with a failure."""
    algorithms, runs, epochs = list(ALGORITHMS), args.runs, EPOCHS
    crowds = [RANKS, CROWD]
    if args.quick:
        algorithms, runs, epochs, crowds = ["aladdin-ahead"], 1, EPOCHS / 4, [RANKS]
    times = {RANKS: runs, CROWD: max(1, runs // 3)}  # runs of a crowd take long
    rows, missed = [], []
    for ranks, algorithm in product(crowds, algorithms):
        try:
            found = failure_row(algorithm, ranks, times[ranks], epochs)
        except UserError as error:  # the other rows are of use without this one
            missed.append(str(error))
            continue
        rows.append(found)
        if found["share"] < BARS[ranks]:
            missed.append(
                f"{algorithm}, {ranks} ranks: {found['share']:.2f} of the throughput per core "
                f"before the failure, expected {BARS[ranks]}"
            )
    return harness.Findings("Throughput after a failure", rows, FAILURE_NOTES, missed)


def overhead(args: argparse.Namespace) -> harness.Findings:
    """Run the trainings with and without ULFM, without failures."""
    cases, pairs, shorter = (CASES[:1], 1, 0.1) if args.quick else (CASES, args.runs, 1.0)
    rows = [row(case, pairs, shorter) for case in cases]
    missed = [
        f"{found['training']}: {found['share']:.3f} of the throughput without, expected {BAR}"
        for found in rows
        if found["share"] < BAR
    ]
    return harness.Findings("Throughput with ULFM, without failures", rows, NOTES, missed)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = harness.make_parser(NAME, "Measure throughput with ULFM.")
    add = parser.add_argument
    add("--failure", action="store_true", help="kill a rank in the middle of each run")
    add("--runs", type=whole(), default=7, help="number of runs, or pairs of runs, of a training")
    add("--quick", action="store_true", help="one short run, or pair of runs, of one training")
    args = parser.parse_args(argv)
    facts = machine()
    found = failures(args) if args.failure else overhead(args)
    return harness.publish(NAME, argv, args, facts, found, "failure" if args.failure else "")


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
