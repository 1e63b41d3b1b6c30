"""Compare a parameter server's throughput with a bare loop of receives and with RPC.

    python -m benchmarks.intake --save --check
    python -m benchmarks.intake --quick

All ranks are on this machine. The workers compute nothing and send as fast as they can. Rank 0 is
ALADDIN's server as in training, an mpi4py loop that discards the same messages, or a server called
through torch.distributed.rpc that adds up the same buckets.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks import harness, quick
from benchmarks.bounds import positive, whole
from benchmarks.machine import machine

BARE = "bare"
RPC = "torch rpc"
PI = {"accumulate": 10**9, "pi 4": 4}
"""Each kind of ALADDIN server, and the number of gradients per model sent to a worker."""

BAR = 0.9
"""Smallest ratio to the bare loop, ..."""
BAR_RECEIVER = "accumulate"
"""... of a server that only accumulates."""
BAR_RPC = 1.0
"""Smallest ratio of such a server to the one that RPC calls."""

Record = Mapping[str, Any]
NOTES = """\
accumulate: the server adds up gradients; pi 4: it also updates the model and sends it to a worker
for every four of its gradients, as in training. Bare: the same messages in the same order, with the
same number of receives posted ahead, are discarded. RPC: workers call torch's RPC server with the
same buckets and the same number of gradients in flight, and it adds them up. The ratios are those
of the medians."""
QUICK = {"workers": [2], "megabytes": 8.0, "gradients": 4, "repeats": 2}
_SLOWEST = 0.05e9  # bytes per second, for the time limits


def measure(args: argparse.Namespace, workers: int) -> list[Record]:
    """Return all records of `benchmarks.programs.intake` with this number of workers."""
    options = {
        "--megabytes": [args.megabytes],
        "--bucket-mb": args.bucket_mb,
        "--gradients": [args.gradients],
        "--ring": [args.ring],
        "--repeats": [args.repeats],
        "--receiver": [BARE, *PI, RPC],
    }
    words = [word for name, values in options.items() for word in (name, *map(str, values))]
    runs = args.repeats * len(args.bucket_mb) * (2 + len(PI))
    limit = 180 + runs * args.gradients * workers * args.megabytes * 1e6 / _SLOWEST
    program = ["-m", "benchmarks.programs.intake", *words]
    records: list[Record] = harness.json_printed(harness.run_here(1 + workers, program, limit))
    return records


def rows(records: Sequence[Record], workers: int, gigabytes: float) -> list[dict[str, Any]]:
    """Return the table for one number of workers; each measurement receives ``gigabytes``."""
    found = []
    for bucket_mb in dict.fromkeys(record["bucket_mb"] for record in records):
        bare, rpc = (gigabytes / _seconds(records, bucket_mb, each) for each in (BARE, RPC))
        for receiver in PI:
            rate = gigabytes / _seconds(records, bucket_mb, receiver)
            found.append(
                {
                    "workers": workers,
                    "bucket, MB": bucket_mb,
                    "server": receiver,
                    "intake, GB/s": rate,
                    "bare, GB/s": bare,
                    "rpc, GB/s": rpc,
                    "ratio": rate / bare,
                    "ratio to rpc": rate / rpc,
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
    """Return a description of each row that misses a bar."""
    found = []
    for row in table:
        case = f"{row['workers']} workers, buckets of {row['bucket, MB']:g} MB"
        if row["server"] != BAR_RECEIVER:
            continue
        if row["ratio"] < BAR:
            found.append(f"{case}: {row['ratio']:.2f} of the bare loop, expected at least {BAR}")
        if row["ratio to rpc"] < BAR_RPC:
            found.append(f"{case}: {row['ratio to rpc']:.2f} of RPC, expected at least {BAR_RPC}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = harness.make_parser(
        "intake", "Measure how fast a parameter server receives gradients."
    )
    add = parser.add_argument
    add("--workers", type=whole(), nargs="+", default=[2, 3], help="numbers of workers")
    add("--megabytes", type=positive, default=100.0, help="size of a gradient in MB")
    add("--bucket-mb", type=positive, nargs="+", default=[4.0], help="sizes of buckets in MB")
    add("--gradients", type=whole(), default=20, help="gradients of each worker in one measurement")
    add("--ring", type=whole(), default=2, help="gradients of a worker in flight at the same time")
    add(
        "--repeats",
        type=whole(),
        default=5,
        help="number of measurements of which the median is taken",
    )
    args = quick.parse(parser, argv, QUICK)
    facts = machine()
    table: list[dict[str, Any]] = []
    for workers in args.workers:
        gigabytes = workers * args.gradients * args.megabytes / 1e3
        table += rows(measure(args, workers), workers, gigabytes)
    title = f"Gradients of {args.megabytes:g} MB received by one server"
    found = harness.Findings(title, table, NOTES, missed(table))
    return harness.publish("intake", argv, args, facts, found)


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
