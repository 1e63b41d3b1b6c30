"""How much longer a step takes when its gradient is summed, by each library that can do it.

    python -m benchmarks.allreduce
    python -m benchmarks.allreduce --ranks 2 4 --repeats 5
    python -m benchmarks.allreduce --hosts 2 --ranks 2     # network lab; needs root

The choice that ``aladdin_mpi.allreduce`` makes by itself rests on it.
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
A step computes, and after every share of it a bucket is complete and begins to be summed; it ends
when all sums are there. The figures are what summing adds to the step's computing alone, on the
slowest rank. Computing: none; sleep, as on a GPU; torch, matrix products on one thread, which
share the cores with whatever moves the messages. All ranks have a progress thread for MPI.
The backends are those of `aladdin_mpi.allreduce`: mpi is MPI's own non-blocking all-reduce, or
with bf16 plain messages; ring is messages around a ring; torch is gloo."""


def measure(args: argparse.Namespace, ranks: int) -> list[Record]:
    """All records of the program with so many ranks."""
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
        # The lab resolves no names, by which torch.distributed would look for its peers.
        env = {"MASTER_ADDR": lab.address(0), "GLOO_SOCKET_IFNAME": INTERFACE}
        return lab.run(ranks, program, args.limit, env)


def rows(records: Sequence[Record], ranks: int) -> list[dict[str, Any]]:
    """The table for one number of ranks: a row for each size and way of computing."""
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
    """The command line; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = harness.make_parser("allreduce", "What it costs to sum gradients over all ranks.")
    add = parser.add_argument
    present = [b for b in BACKENDS if b != "horovod" or horovod.library() is not None]
    add("--ranks", type=whole(2), nargs="+", default=[2], help="numbers of ranks")
    add("--backend", nargs="+", choices=BACKENDS, default=present, help="what is measured")
    add("--megabytes", type=positive, nargs="+", default=[0.04, 4.0, 94.0], help="a gradient")
    add("--bucket-mb", type=positive, default=4.0, help="a bucket, in MB")
    add("--rounds", type=whole(), default=50, help="of about 2 ms of computing in a step")
    add("--steps", type=whole(), default=5, help="in one measurement")
    add("--repeats", type=whole(), default=3, help="of which medians are taken")
    add("--hosts", type=whole(0), default=0, help="hosts of the network lab; 0: this machine")
    add("--rate", type=positive, default=1.0, help="each host's link in the lab, in Gbit/s")
    add("--limit", type=positive, default=600.0, help="longest run, in s")
    args = parser.parse_args(argv)
    facts = machine()
    table = [row for ranks in args.ranks for row in rows(measure(args, ranks), ranks)]
    where = f"{args.hosts} hosts at {args.rate:g} Gbit/s" if args.hosts else "one machine"
    title = f"What summing a gradient adds to a step, on {where}"
    return harness.publish("allreduce", argv, args, facts, harness.Findings(title, table, NOTES))


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
