"""Measure the accuracy of simulated runs that lose rank 0, a server and two of eight workers.

    python -m benchmarks.takeover --check --save
    python -m benchmarks.takeover --quick

Digits, 8 workers and 2 servers if the algorithm has any. Rank 0 fails after a quarter of the run,
then a worker, the other server and another worker; with `--spares` there is a spare rank for each.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from aladdin_mpi.options.algorithms import find_algorithm
from aladdin_mpi.options.run import SimulateOptions, parse
from aladdin_mpi.run.trainer import simulate
from benchmarks import harness
from benchmarks.bounds import whole
from benchmarks.machine import machine

NAME = "takeover"
WORKERS = 8
EPOCHS = 5.0
STEP = 0.1
"""Duration of a worker's step in seconds."""
BATCH = 16
EPOCH = 1437
"""Number of training samples of digits."""
START = 1.0
"""Simulated second at which training begins, ..."""
PAUSE = 2.0
"""... and duration of the pause when a group is revoked."""

NOTES = """\
Test accuracy in %, mean and standard deviation over the seeds. Lost: samples whose gradients were
in flight, in % of the run's, the mean. Expected: the mean of the disturbed runs within two standard
deviations of single undisturbed runs, or above."""


@dataclass(frozen=True)
class Case:
    """An algorithm and its number of spare ranks."""

    algorithm: str
    spares: int = 0


CASES = (
    Case("aladdin-ahead"),
    Case("aladdin-ahead", 4),
    Case("aladdin"),
    Case("asp"),
    Case("easgd"),
    Case("ad-psgd"),
    Case("sgp"),
)


def failures(case: Case, epochs: float) -> dict[int, float]:
    """Return the failing ranks and their times, in simulated seconds."""
    length = epochs * EPOCH / (WORKERS * BATCH) * STEP
    servers = 2 if find_algorithm(case.algorithm).has_servers else 0
    first, second = servers + 1, servers + 4
    order = [0, first, 1, second] if servers else [0, first, second]
    # Each earlier failure has cost a pause.
    return {
        rank: START + length * (0.25 + 0.15 * turn) + PAUSE * turn
        for turn, rank in enumerate(order)
    }


def run(case: Case, seed: int, epochs: float, is_disturbed: bool) -> dict[str, Any]:
    """Return the summary of one run."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--algorithm", case.algorithm, "--workers", str(WORKERS), "--seed", str(seed)]
        words += ["--epochs", str(epochs), "--batch-size", str(BATCH), "--servers", "2"]
        words += ["--compute-time", str(STEP), "--eval-every", "0", "--quiet"]
        words += ["--model", "digits", "--dataset", "digits", "--hosts", str(WORKERS)]
        if is_disturbed:
            told = [f"{rank}={at}" for rank, at in failures(case, epochs).items()]
            words += ["--spares", str(case.spares), "--failures", *told]
        words += ["--run-dir", str(Path(folder) / "run")]
        return simulate(parse(SimulateOptions, words, NAME, ""))


def row(case: Case, seeds: int, epochs: float) -> dict[str, Any]:
    """Return a row of the table."""
    calm = [run(case, seed, epochs, False) for seed in range(seeds)]
    hurt = [run(case, seed, epochs, True) for seed in range(seeds)]
    died = [sum("samples_lost" in each for each in found["failures"]) for found in hurt]
    print(case, [found["test_accuracy"] for found in calm + hurt], died, file=sys.stderr)
    spread = stdev if seeds > 1 else (lambda values: 0.0)
    calm_at, hurt_at = ([100 * found["test_accuracy"] for found in runs] for runs in (calm, hurt))
    return {
        "algorithm": case.algorithm,
        "spares": case.spares,
        "ranks lost": min(died),
        "undisturbed": mean(calm_at),
        "undisturbed, +-": spread(calm_at),
        "disturbed": mean(hurt_at),
        "disturbed, +-": spread(hurt_at),
        "lost": mean(100 * found["samples_lost"] / found["samples"] for found in hurt),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = harness.make_parser(
        NAME, "Measure the accuracy of runs that lose ranks of every kind."
    )
    parser.add_argument("--seeds", type=whole(), default=5, help="number of runs of each kind")
    parser.add_argument("--quick", action="store_true", help="one seed and one epoch of the first")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    facts = machine()
    cases, seeds, epochs = (CASES[:1], 1, 1.0) if args.quick else (CASES, args.seeds, EPOCHS)
    rows = [row(case, seeds, epochs) for case in cases]
    missed = [
        f"{found['algorithm']}: {found['disturbed']:.2f} %, undisturbed "
        f"{found['undisturbed']:.2f} +- {found['undisturbed, +-']:.2f} %"
        for found in rows
        if not args.quick
        and found["disturbed"] < found["undisturbed"] - 2 * found["undisturbed, +-"]
    ]
    title = "Runs that lose rank 0, a server and two of eight workers"
    return harness.publish(NAME, argv, args, facts, harness.Findings(title, rows, NOTES, missed))


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
