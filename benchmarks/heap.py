"""Measure the effect of keeping freed memory for the next step on a CPU.

    python -m benchmarks.heap --check --save
    python -m benchmarks.heap --quick

A training loop in plain torch, in one process, with glibc's default heap and with the settings of
`aladdin_mpi.process.heap`, which every run on a CPU uses.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from aladdin_mpi.errors import UserError
from aladdin_mpi.process.heap import CHOSEN
from benchmarks import harness, quick
from benchmarks.bounds import whole
from benchmarks.machine import machine

PROGRAM = "benchmarks.programs.heap"
LIMIT = 600.0
BAR = 1.0
"""Longest step with the memory kept, as a multiple of the default."""
NOTES = """\
Medians over alternating repeats of the median step of each. Page faults: pages of 4 KB that the
system zeroes and supplies in a step."""
QUICK = {"model": ["digits"], "batch": 2, "steps": 3, "repeats": 1}


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return all records, one for each process."""
    records = []
    for _, model, keep in itertools.product(range(args.repeats), args.model, (False, True)):
        words = ["--model", model, "--batch", str(args.batch), "--steps", str(args.steps)]
        command = [sys.executable, "-m", PROGRAM, *words, *(["--keep"] if keep else [])]
        environment = {k: v for k, v in harness.environment().items() if k not in CHOSEN}
        done = subprocess.run(
            command, env=environment, timeout=LIMIT, capture_output=True, text=True, check=False
        )
        found = harness.json_printed(done)
        if keep and not found["kept"]:
            raise UserError(
                "this benchmark measures glibc's heap; this system has another C library"
            )
        records.append({"model": model, **found})
    return records


def rows(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the table: a row for each model."""
    table = []
    for model in dict.fromkeys(record["model"] for record in records):
        mine = [record for record in records if record["model"] == model]
        found = {
            (kept, name): median(r[name] for r in mine if r["kept"] == kept)
            for kept in (False, True)
            for name in ("seconds", "faults")
        }
        table.append(
            {
                "model": model,
                "step by itself, ms": 1e3 * found[False, "seconds"],
                "memory kept, ms": 1e3 * found[True, "seconds"],
                "ratio": found[True, "seconds"] / found[False, "seconds"],
                "page faults by itself": found[False, "faults"],
                "memory kept": found[True, "faults"],
            }
        )
    return table


def missed(table: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a description of each row in which a step takes longer."""
    return [
        f"{row['model']}: a step takes {row['ratio']:.2f} of one with the default heap, expected "
        f"at most {BAR:g}"
        for row in table
        if row["ratio"] > BAR
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = harness.make_parser("heap", "Measure the effect of keeping freed memory.")
    add = parser.add_argument
    add(
        "--model",
        nargs="+",
        default=["resnet20", "resnet56", "vgg16_bn_cifar"],
        help="image models",
    )
    add("--batch", type=whole(), default=32, help="samples per step")
    add("--steps", type=whole(), default=8, help="number of steps in one process")
    add("--repeats", type=whole(), default=5, help="number of repeats of which the median is taken")
    args = quick.parse(parser, argv, QUICK)
    facts = machine()
    table = rows(measure(args))
    found = harness.Findings("Keeping freed memory for the next step", table, NOTES, missed(table))
    return harness.publish("heap", argv, args, facts, found)


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
