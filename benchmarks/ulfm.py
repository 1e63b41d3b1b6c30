"""Measure the overhead of ULFM: throughput with `mpirun --with-ft ulfm` but without failures.

    python -m benchmarks.ulfm --check --save
    python -m benchmarks.ulfm --quick

The two runs of a pair follow each other, in alternating order. Steps are the smallest possible, and
those of ResNet-20 at CIFAR-10's size; all ranks are on this machine.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from aladdin_mpi.errors import UserError
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = harness.make_parser(NAME, "Measure the overhead of ULFM without failures.")
    parser.add_argument(
        "--pairs", type=whole(), default=7, help="number of pairs of runs of each training"
    )
    parser.add_argument("--quick", action="store_true", help="one short pair of the first")
    args = parser.parse_args(argv)
    facts = machine()
    cases, pairs, shorter = (CASES[:1], 1, 0.1) if args.quick else (CASES, args.pairs, 1.0)
    rows = [row(case, pairs, shorter) for case in cases]
    missed = [
        f"{found['training']}: {found['share']:.3f} of the throughput without, expected {BAR}"
        for found in rows
        if found["share"] < BAR
    ]
    title = "Throughput with ULFM, without failures"
    return harness.publish(NAME, argv, args, facts, harness.Findings(title, rows, NOTES, missed))


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
