"""Check that messages make progress while a rank computes.

    python -m benchmarks.progress --check

Two hosts of the network lab (requires root). Rank 0 starts to send, computes for longer than the
message needs, and waits for the rest, with and without the transport's progress thread.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from aladdin_mpi.errors import UserError
from benchmarks import harness
from benchmarks.bounds import positive, whole
from benchmarks.lab import Lab
from benchmarks.machine import machine

BAR = 0.05
"""Largest wait with progress, as a share of the time on the wire, ..."""
BAR_COMPUTINGS = ("sleep", "torch")
"""... during these kinds of computation."""
_OVERHEAD = 1.15  # of the lab's link: TCP/IP headers and socket buffering

Record = Mapping[str, Any]
NOTES = """\
The wait is the time for which a rank still waits after computing; if both ranks compute, the longer
one. The time on the wire is that of the same messages without computation. All are medians.
Computing: sleep, as on a GPU; torch, products and convolutions on one thread; python, a loop that
never leaves the interpreter. Its speed is relative to computing without any message."""


def measure(args: argparse.Namespace) -> list[Record]:
    """Return all records of `benchmarks.programs.overlap` from a run in a lab of two hosts."""
    wire = args.megabytes * 8e-3 / args.rate
    if args.compute < wire * _OVERHEAD:
        raise UserError(
            f"--compute: expected more than the time on the wire, about {wire * _OVERHEAD:.2f} s, "
            f"got {args.compute:g} s; compute longer or send less"
        )
    options = {
        "--megabytes": [args.megabytes],
        "--message-mb": [args.megabytes, *args.message_mb],
        "--seconds": [args.compute],
        "--repeats": [args.repeats],
    }
    words = [word for name, values in options.items() for word in (name, *map(str, values))]
    cases = 6 * (1 + 4 * (1 + len(args.message_mb)))
    with Lab(hosts=2, rate_gbit=args.rate) as lab:
        limit = 60 + 2 * args.repeats * cases * (args.compute + wire)
        done = lab.run(2, ["-m", "benchmarks.programs.overlap", *words], timeout=limit)
    records: list[Record] = harness.json_printed(done)
    return records


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the table: one row for each case with messages during computation."""
    found = []
    for case in _cases(records):
        if case["computing"] == "none" or not case["message_mb"]:
            continue
        wire = _median(records, {**case, "computing": "none"}, _waited)
        wait = _median(records, case, _waited)
        found.append(
            {
                "computing": case["computing"],
                "who computes": "both" if case["both"] else "sender",
                "message, MB": case["message_mb"],
                "progress": "yes" if case["progress"] else "no",
                "wire, s": wire,
                "wait, s": wait,
                "wait / wire": wait / wire,
                "computing speed": _speed(records, case),
            }
        )
    return found


def missed(table: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a description of each row that exceeds the bar."""
    return [
        f"{row['computing']}, {row['who computes']}, {row['message, MB']:g} MB: the wait is "
        f"{row['wait / wire']:.1%} of the time on the wire, expected at most {BAR:.0%}"
        for row in table
        if row["progress"] == "yes"
        and row["computing"] in BAR_COMPUTINGS
        and row["wait / wire"] > BAR
    ]


_KEYS = ("computing", "both", "message_mb", "progress")


def _cases(records: Sequence[Record]) -> list[dict[str, Any]]:
    cases = [{key: record[key] for key in _KEYS} for record in records]
    return [case for i, case in enumerate(cases) if case not in cases[:i]]


def _waited(record: Record) -> float:
    ranks = record["ranks"]
    if record["both"] or record["computing"] == "none":
        return float(max(rank["waited"] for rank in ranks))
    return float(ranks[0]["waited"])


def _rate(record: Record) -> float:
    """Return the rounds of computing per second of all ranks that compute."""
    return float(sum(rank["rounds"] / rank["computed"] for rank in record["ranks"]))


def _speed(records: Sequence[Record], case: Record) -> float | None:
    alone = _median(records, {**case, "message_mb": 0.0, "progress": False}, _rate)
    return _median(records, case, _rate) / alone if alone else None


def _median(records: Sequence[Record], case: Record, of: Any) -> float:
    wanted = [of(record) for record in records if all(record[k] == case[k] for k in _KEYS)]
    return float(median(wanted))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = harness.make_parser(
        "progress", "Measure how long a rank waits for messages sent during computation."
    )
    parser.add_argument(
        "--megabytes", type=positive, default=50.0, help="size of the data sent in MB"
    )
    parser.add_argument(
        "--message-mb",
        type=positive,
        nargs="*",
        default=[4.0],
        help="size of a second series of messages in MB",
    )
    parser.add_argument("--compute", type=positive, default=0.6, help="computing time in s")
    parser.add_argument(
        "--rate", type=positive, default=1.0, help="rate of each host's link in Gbit/s"
    )
    parser.add_argument(
        "--repeats",
        type=whole(),
        default=5,
        help="number of measurements of which the median is taken",
    )
    args = parser.parse_args(argv)
    facts = machine()
    table = rows(measure(args))
    title = f"{args.megabytes:g} MB at {args.rate:g} Gbit/s, sent during {args.compute:g} s of work"
    found = harness.Findings(title, table, NOTES, missed(table))
    return harness.publish("progress", argv, args, facts, found)


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
