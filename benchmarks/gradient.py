"""Count the memory passes, messages, polls and sleeps along the path of one gradient.

    python -m benchmarks.gradient --save --check
    python -m benchmarks.gradient --quick

Trains with ALADDIN on this machine and counts inside the functions; docs/design/performance.md
describes each of them. No times are measured: except for polls and sleeps, the counts are the same
on a busy machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks import harness, quick
from benchmarks.bounds import positive, whole
from benchmarks.machine import machine

PROGRAM = "benchmarks.programs.gradient"
BUDGET: dict[tuple[str, str], tuple[float, float]] = {
    ("worker", "backward"): (1, 1),
    ("worker", "look"): (1, 0),
    ("worker", "own update"): (8, 5),
    ("worker", "wire buffer"): (0, 0),
    ("worker", "blend"): (0.5, 0.25),
    ("server", "accumulation"): (2.5, 0.75),
    ("server", "update"): (0.5, 0.25),
    ("server", "model copy"): (0.25, 0.25),
}
"""Budget: largest reads and writes of each stage for one gradient, in gradients, with pi = 4."""
BUDGET_PI = 4
TOLERANCE = 0.05
"""Tolerance in gradients: small vectors are not counted, and updates are not exactly 1 in pi."""

Record = Mapping[str, Any]
NOTES = """\
For one gradient, over all its buckets, means over the run. Passes: reads and writes of torch's
operations, in lengths of the gradient, from the cache or from memory. Messages, polls of MPI,
completions and sleeps: of the rank and of its progress thread during training."""
QUICK = {"model": "digits", "batch": 2, "steps": 8, "bucket_mb": 0.04}


def measure(args: argparse.Namespace) -> list[Record]:
    """Return the counts of every rank."""
    values = {
        "--model": args.model,
        "--batch": args.batch,
        "--steps": args.steps,
        "--pi": args.pi,
        "--bucket-mb": args.bucket_mb,
    }
    words = [str(word) for pair in values.items() for word in pair]
    done = harness.run_here(1 + args.workers, ["-m", PROGRAM, *words], args.limit)
    records: list[Record] = harness.json_printed(done)
    return records


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the table: the stages of worker and server, then the counts of messages."""
    found = []
    for role, mine in (("worker", records[1:]), ("server", records[:1])):
        found += [_stage(role, stage, mine) for stage in _names(mine, "stages")]
    for role, mine in (("worker", records[1:]), ("server", records[:1])):
        found += [_count(role, name, mine) for name in sorted(_names(mine, "counts"))]
    return found


def _names(records: Sequence[Record], kind: str) -> list[str]:
    return list(dict.fromkeys(name for record in records for name in record[kind]))


def _stage(role: str, stage: str, records: Sequence[Record]) -> dict[str, Any]:
    gradients = sum(record["gradients"] for record in records)
    length = gradients * records[0]["gradient bytes"]
    mine = [record["stages"][stage] for record in records if stage in record["stages"]]
    return {
        "at": role,
        "what": stage,
        "times": sum(each["calls"] for each in mine) / gradients,
        "operations": sum(sum(each["operations"].values()) for each in mine) / gradients,
        "read, gradients": sum(each["read"] for each in mine) / length,
        "written, gradients": sum(each["written"] for each in mine) / length,
    }


def _count(role: str, name: str, records: Sequence[Record]) -> dict[str, Any]:
    gradients = sum(record["gradients"] for record in records)
    total = sum(record["counts"].get(name, 0) for record in records)
    return {"at": role, "what": name, "times": total / gradients}


def missed(table: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a description of each stage that reads or writes more than the budget allows."""
    found = []
    for row in table:
        allowed = BUDGET.get((row["at"], row["what"]))
        if allowed is None:
            continue
        for kind, most in zip(("read", "written"), allowed, strict=True):
            if row[f"{kind}, gradients"] > most + TOLERANCE:
                found.append(
                    f"{row['at']}, {row['what']}: {kind} {row[f'{kind}, gradients']:.2f} "
                    f"gradients, expected at most {most:g}"
                )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = harness.make_parser("gradient", "Count the cost of one gradient's path.")
    add = parser.add_argument
    add("--workers", type=whole(), default=2, help="number of workers; there is one server")
    add("--model", default="vgg8_cifar", help="an image model")
    add("--batch", type=whole(), default=2, help="samples per step")
    add("--steps", type=whole(), default=40, help="steps of every worker")
    add("--pi", type=whole(), default=BUDGET_PI, help="ALADDIN's pi; the budget is for the default")
    add("--bucket-mb", type=positive, default=4.0, help="largest message in MB")
    add("--limit", type=positive, default=300.0, help="time limit of a run in s")
    args = quick.parse(parser, argv, QUICK)
    facts = machine()
    table = rows(measure(args))
    late = missed(table) if args.pi == BUDGET_PI else []
    found = harness.Findings("The cost of one gradient's path", table, NOTES, late)
    return harness.publish("gradient", argv, args, facts, found)


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
