"""How fast a parameter server takes in gradients, beside a bare loop of receives.

    python -m benchmarks.intake --save --check
    python -m benchmarks.intake --quick

All ranks are on this machine. The workers send as fast as they can and compute nothing; rank 0
is ALADDIN's server as in training, a loop of mpi4py that drops the same messages, or a server that
is called through torch.distributed.rpc and adds up the same buckets.
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
"""Each kind of ALADDIN server, and for how many gradients it sends a worker a model."""

BAR = 0.9
"""Smallest ratio to the bare loop, ..."""
BAR_RECEIVER = "accumulate"
"""... of a server that only accumulates."""
BAR_RPC = 1.0
"""Smallest ratio of such a server to the one that RPC calls."""

Record = Mapping[str, Any]
NOTES = """\
accumulate: the server adds up what comes; pi 4: it also updates the model and sends it back to a
worker for every four of its gradients, as in training. Bare: the same messages in the same order,
with as many receives posted ahead, dropped. RPC: workers call torch's RPC server with the same
buckets, as many gradients of each under way at once, and it adds them up. The ratios are those of
the medians."""
QUICK = {"workers": [2], "megabytes": 8.0, "gradients": 4, "repeats": 2}
_SLOWEST = 0.05e9  # bytes per second, for the time limits


def measure(args: argparse.Namespace, workers: int) -> list[Record]:
    """All records of `benchmarks.programs.intake` with so many workers."""
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
    """The table for one number of workers; ``gigabytes`` come in at each measurement."""
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
    """The rows that miss a bar, in words."""
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
    """The command line; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = harness.make_parser("intake", "How fast a parameter server takes in gradients.")
    add = parser.add_argument
    add("--workers", type=whole(), nargs="+", default=[2, 3], help="numbers of workers")
    add("--megabytes", type=positive, default=100.0, help="a gradient, in MB")
    add("--bucket-mb", type=positive, nargs="+", default=[4.0], help="sizes of buckets, in MB")
    add("--gradients", type=whole(), default=20, help="of each worker in one measurement")
    add("--ring", type=whole(), default=2, help="gradients of a worker on the wire at once")
    add("--repeats", type=whole(), default=5, help="of which medians are taken")
    args = quick.parse(parser, argv, QUICK)
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
