"""Compare the algorithms with AdamW in simulations: a small GPT, equal numbers of samples.

    python -m benchmarks.gpt --out runs/gpt --check --save
    python -m benchmarks.gpt --out runs/gpt --algorithms ar-sgd aladdin-ahead --workers 2 4 8 16
    python -m benchmarks.gpt --out runs/gpt --quick

Gradients are real. Runs that are already in the folder are reused.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from math import nan
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from aladdin_mpi.errors import UserError
from benchmarks import harness, quick
from benchmarks.bounds import whole
from benchmarks.harness import Findings
from benchmarks.machine import machine

BASE = "ar-sgd"
ALGORITHMS = (BASE, "bsp", "aladdin", "aladdin-ahead", "asp", "osgp", "easgd", "local-sgd")
WORKERS = (2, 4)
SEEDS, EPOCHS = 3, 4.0
BARS = {("aladdin", 2): 1.02} | {("aladdin-ahead", n): 1.02 for n in (2, 4, 8, 16)}
"""Largest test loss, relative to `ar-sgd` with the same number of workers."""
PROGRAM = Path(__file__).parent / "programs" / "gpt.py"
QUICK = {"algorithms": [BASE, "aladdin"], "workers": [2], "seeds": 1, "epochs": 0.1}

TITLE = "AdamW by algorithm: a character-level GPT of 110,000 parameters"
NOTES = """\
Test loss in nats per character of the global model at the end: mean over the seeds with standard
deviation, and relative to `ar-sgd` with the same number of workers, which steps as one process does
with the mean gradient. AdamW with two groups, beta 0.9 and 0.95, rate 0.005 with a warm-up of half
an epoch and half a cosine, batches of 8 for each worker, gradients clipped to a norm of 1: the mean
of all with `ar-sgd`, in parts with `aladdin-ahead`, each worker's own otherwise. The algorithms'
own options are at their defaults; equal workers, 0.1 s per step, links of 10 Gbit/s."""


def one(args: argparse.Namespace, algorithm: str, workers: int, seed: int) -> float:
    """Return the test loss of a run, training first if it is not in the folder."""
    folder = args.out / f"{algorithm}-{workers}-{seed}"
    if not (folder / "summary.json").is_file():
        typed = ["--workers", workers, "--algorithm", algorithm, "--overwrite", "--"]
        script = [PROGRAM, *typed, folder, seed, args.epochs]
        command = [sys.executable, "-m", "aladdin_mpi.simulate", *map(str, script)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(f"{folder}: the run failed:\n{done.stdout}{done.stderr}")
        print(f"{algorithm}, {workers} workers, seed {seed}: done", file=sys.stderr)
    loss = json.loads((folder / "summary.json").read_text())["test_loss"]
    return nan if loss is None else float(loss)  # null: it has diverged


def rows_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each algorithm."""
    found: list[dict[str, Any]] = [{"algorithm": algorithm} for algorithm in args.algorithms]
    for workers in args.workers:
        base = 0.0
        for row in found:
            seeds = range(args.seeds)
            losses = [one(args, row["algorithm"], workers, seed) for seed in seeds]
            base = base or mean(losses)
            spread = f" ± {stdev(losses):.3f}" if len(losses) > 1 else ""
            row[f"{workers} workers"] = f"{mean(losses):.3f}{spread}"
            row[f"{workers}, to {BASE}"] = mean(losses) / base
    return found


def missed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a description of each bar that was missed."""
    return [
        f"{algorithm} with {workers} workers: {ratio:.3f} of the test loss of {BASE}, expected at "
        f"most {most}"
        for row in rows
        for (algorithm, workers), most in BARS.items()
        if row["algorithm"] == algorithm and (ratio := row.get(f"{workers}, to {BASE}", 0.0)) > most
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = quick.parse(_parser(), argv, QUICK)
    if args.algorithms[0] != BASE:
        raise UserError(f"--algorithms: expected {BASE} first, got {args.algorithms[0]}; add it")
    facts = machine()
    rows = rows_of(args)
    found = Findings(TITLE, rows, NOTES, missed(rows))
    case = "" if args.algorithms == list(ALGORITHMS) else "-".join(args.algorithms[1:])
    return harness.publish("gpt", argv, args, facts, found, case)


def _parser() -> argparse.ArgumentParser:
    parser = harness.make_parser("gpt", (__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FOLDER", help="folder for the runs")
    add("--algorithms", nargs="+", default=list(ALGORITHMS), metavar="NAME", help="which")
    add("--workers", type=whole(2), nargs="+", default=list(WORKERS), help="numbers of workers")
    add("--seeds", type=whole(1), default=SEEDS, help="number of runs of each")
    add("--epochs", type=float, default=EPOCHS, help="length of a run in epochs")
    return parser


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
