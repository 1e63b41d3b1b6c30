"""Measure the time that summing the gradient adds to a step, for each all-reduce backend.

    python -m benchmarks.allreduce
    python -m benchmarks.allreduce --ranks 2 4 --repeats 5
    python -m benchmarks.allreduce --hosts 2 --ranks 2     # network lab; needs root

The default choice of ``aladdin_mpi.allreduce`` is based on these figures.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from aladdin_mpi.allreduce import horovod
from benchmarks import harness
from benchmarks.bounds import positive, whole
from benchmarks.lab import Lab
from benchmarks.machine import machine
from benchmarks.netns import INTERFACE

BACKENDS = ("mpi", "ring", "horovod", "torch", "mpi-bf16", "torch-bf16")
PROGRAM = "benchmarks.programs.allreduce"

Record = Mapping[str, Any]
NOTES = """\
During a step's computation, buckets are completed and their all-reduce starts; the step ends when
all sums are complete. The figures are the time added to the computation alone, on the slowest rank.
Computing: none; sleep, as on a GPU; torch, matrix products on one thread, which share the cores
with the communication. All ranks have a progress thread for MPI.
The backends are those of `aladdin_mpi.allreduce`: mpi is MPI's own non-blocking all-reduce, or
with bf16 plain messages; ring is messages around a ring; torch is gloo."""


def measure(args: argparse.Namespace, ranks: int) -> list[Record]:
    """Return all records of the program with this number of ranks."""
    options = {
        "--backend": args.backend,
        "--megabytes": args.megabytes,
        "--bucket-mb": [args.bucket_mb],
        "--rounds": [args.rounds],
        "--steps": [args.steps],
        "--repeats": [args.repeats],
    }
    words = [word for name, values in options.items() for word in (name, *map(str, values))]
    records: list[Record] = harness.json_printed(_run(args, ranks, ["-m", PROGRAM, *words]))
    return records


def _run(
    args: argparse.Namespace, ranks: int, program: Sequence[str]
) -> subprocess.CompletedProcess[str]:
    if args.hosts == 0:
        return harness.run_here(ranks, program, args.limit)
    with Lab(args.hosts, args.rate) as lab:
        # torch.distributed would look up its peers by name, and the lab has no name resolution.
        env = {"MASTER_ADDR": lab.address(0), "GLOO_SOCKET_IFNAME": INTERFACE}
        return lab.run(ranks, program, args.limit, env)


def rows(records: Sequence[Record], ranks: int) -> list[dict[str, Any]]:
    """Return the table for one number of ranks: a row for each size and kind of computation."""
    backends = dict.fromkeys(r["backend"] for r in records if r["backend"] != "none")
    cases = dict.fromkeys((r["megabytes"], r["computing"]) for r in records)
    found = []
    for megabytes, computing in cases:
        alone = _seconds(records, "none", megabytes, computing)
        row = {"ranks": ranks, "MB": megabytes, "computing": computing, "alone, ms": 1e3 * alone}
        for backend in backends:
            added = _seconds(records, backend, megabytes, computing) - alone
            row[f"{backend}, ms"] = 1e3 * added
        found.append(row)
    return found


def _seconds(records: Sequence[Record], backend: str, megabytes: float, computing: str) -> float:
    wanted = {"backend": backend, "megabytes": megabytes, "computing": computing}
    return median(r["seconds"] for r in records if all(r[k] == v for k, v in wanted.items()))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = harness.make_parser(
        "allreduce", "Measure the cost of summing gradients over all ranks."
    )
    add = parser.add_argument
    present = [b for b in BACKENDS if b != "horovod" or horovod.library() is not None]
    add("--ranks", type=whole(2), nargs="+", default=[2], help="numbers of ranks")
    add("--backend", nargs="+", choices=BACKENDS, default=present, help="backends to measure")
    add(
        "--megabytes",
        type=positive,
        nargs="+",
        default=[0.04, 4.0, 94.0],
        help="size of a gradient in MB",
    )
    add("--bucket-mb", type=positive, default=4.0, help="size of a bucket in MB")
    add("--rounds", type=whole(), default=50, help="parts of about 2 ms of computation in a step")
    add("--steps", type=whole(), default=5, help="number of steps in one measurement")
    add(
        "--repeats",
        type=whole(),
        default=3,
        help="number of measurements of which the median is taken",
    )
    add("--hosts", type=whole(0), default=0, help="hosts of the network lab; 0: this machine")
    add("--rate", type=positive, default=1.0, help="rate of each host's link in the lab in Gbit/s")
    add("--limit", type=positive, default=600.0, help="time limit of a run in s")
    args = parser.parse_args(argv)
    facts = machine()
    table = [row for ranks in args.ranks for row in rows(measure(args, ranks), ranks)]
    where = f"{args.hosts} hosts at {args.rate:g} Gbit/s" if args.hosts else "one machine"
    title = f"Time that summing a gradient adds to a step, on {where}"
    return harness.publish("allreduce", argv, args, facts, harness.Findings(title, table, NOTES))


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
