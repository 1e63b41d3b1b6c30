"""How fast a parameter server takes in gradients, beside a bare loop of receives.

    python -m benchmarks.intake --check

All ranks are on this machine. The workers send as fast as they can and compute nothing; rank 0
is ALADDIN's server as in training, or a loop of mpi4py that drops the same messages.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks import harness
from benchmarks.machine import machine

BARE = "bare"
PI = {"accumulate": 10**9, "pi 4": 4}
"""Each kind of ALADDIN server, and for how many gradients it sends a worker a model."""

BAR = 0.8
"""Smallest ratio to the bare loop, ..."""
BAR_RECEIVER = "accumulate"
"""... of a server that only accumulates."""

Record = Mapping[str, Any]
NOTES = """\
accumulate: the server adds up what comes; pi 4: it also updates the model and sends it back to a
worker for every four of its gradients, as in training. Bare: the same messages in the same order,
with as many receives posted ahead, dropped. The ratio is that of the medians."""
_SLOWEST = 0.05e9  # bytes per second, for the time limits


def measure(args: argparse.Namespace, workers: int) -> list[Record]:
    """All records of `benchmarks.programs.intake` with so many workers."""
    options = {
        "--megabytes": [args.megabytes],
        "--bucket-mb": args.bucket_mb,
        "--gradients": [args.gradients],
        "--ring": [args.ring],
        "--repeats": [args.repeats],
    }
    words = [word for name, values in options.items() for word in (name, *map(str, values))]
    runs = args.repeats * len(args.bucket_mb) * (1 + len(PI))
    limit = 60 + runs * args.gradients * workers * args.megabytes * 1e6 / _SLOWEST
    program = ["-m", "benchmarks.programs.intake", *words]
    records: list[Record] = harness.json_printed(harness.run_here(1 + workers, program, limit))
    return records


def rows(records: Sequence[Record], workers: int, gigabytes: float) -> list[dict[str, Any]]:
    """The table for one number of workers; ``gigabytes`` come in at each measurement."""
    found = []
    for bucket_mb in dict.fromkeys(record["bucket_mb"] for record in records):
        bare = gigabytes / _seconds(records, bucket_mb, BARE)
        for receiver in PI:
            rate = gigabytes / _seconds(records, bucket_mb, receiver)
            found.append(
                {
                    "workers": workers,
                    "bucket, MB": bucket_mb,
                    "server": receiver,
                    "intake, GB/s": rate,
                    "bare, GB/s": bare,
                    "ratio": rate / bare,
                }
            )
    return found


def _seconds(records: Sequence[Record], bucket_mb: float, receiver: str) -> float:
    return median(
        record["seconds"]
        for record in records
        if record["bucket_mb"] == bucket_mb and record["receiver"] == receiver
    )


def missed(table: Iterable[Mapping[str, Any]]) -> list[str]:
    """The rows that miss the bar, in words."""
    return [
        f"{row['workers']} workers, buckets of {row['bucket, MB']:g} MB: "
        f"{row['ratio']:.2f} of the bare loop, expected at least {BAR}"
        for row in table
        if row["server"] == BAR_RECEIVER and row["ratio"] < BAR
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = harness.make_parser("intake", "How fast a parameter server takes in gradients.")
    add = parser.add_argument
    add("--workers", type=int, nargs="+", default=[2, 3], help="numbers of workers")
    add("--megabytes", type=float, default=100.0, help="a gradient, in MB")
    add("--bucket-mb", type=float, nargs="+", default=[4.0], help="sizes of buckets, in MB")
    add("--gradients", type=int, default=20, help="of each worker in one measurement")
    add("--ring", type=int, default=2, help="gradients of a worker on the wire at once")
    add("--repeats", type=int, default=5, help="of which medians are taken")
    args = parser.parse_args(argv)
    facts = machine()
    table: list[dict[str, Any]] = []
    for workers in args.workers:
        gigabytes = workers * args.gradients * args.megabytes / 1e3
        table += rows(measure(args, workers), workers, gigabytes)
    title = f"Gradients of {args.megabytes:g} MB taken in by one server"
    found = harness.Findings(title, table, NOTES, missed(table))
    return harness.publish("intake", argv, args, facts, found)


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
