"""Measure the network lab for simulations: rate and latency of single messages.

    python -m benchmarks.calibration --save

Requires the lab and root. Two ranks send each other messages, on two hosts and on one. Then eight
ranks on four hosts all send to each other at the same time, so that many flows share links, as in
training. The notes below the table list the values to pass to `aladdin_mpi.simulate`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import harness
from benchmarks.bounds import positive, whole
from benchmarks.lab import Lab
from benchmarks.machine import machine

PATHS = {"between hosts": (0, 1), "inside a host": (0, 0)}
SIZES = (8, 32_000, 1_000_000, 4_000_000)
"""Message sizes in bytes: a header, a short message sent at once, and two announced first."""
CROWD = "all hosts at once"
CROWD_RANKS = (0, 0, 1, 1, 2, 2, 3, 3)
"""The host of each rank that sends to the ranks of all other hosts."""
CROWD_SIZES = SIZES[-2:]
LIMIT = 300.0

NOTES = """\
One: half the round trip of a message on an idle network. Each: time per message if many follow each
other. Both ranks wait with the transport's short sleeps, as in training. All hosts at once: eight
ranks on four hosts, a message from every rank to each of the other hosts' ranks; the rate is that
of a host's link out, while the same amount comes in. Rate: of the largest messages in a row.
Latency: the time of a single message of 1 MB, which is announced first as most are in training,
beyond its bytes at that rate. Overhead: the same for each of many in a row. Negative values: the
shaped link passes the first bytes of a message faster than its rate, which hides latency and
overhead."""


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each path and size."""
    sizes = [str(nbytes) for nbytes in SIZES]
    program = ["-m", "benchmarks.programs.messages", "--bytes", *sizes]
    program += ["--repeats", str(args.repeats)]
    found = []
    with Lab(hosts=2, rate_gbit=args.rate) as lab:
        for path, ranks in PATHS.items():
            for record in harness.json_printed(lab.run(ranks, program, timeout=LIMIT)):
                found.append(
                    {
                        "path": path,
                        "bytes": record["bytes"],
                        "one, ms": 1e3 * record["one"],
                        "each, ms": 1e3 * record["each"],
                        "each, Gbit/s": 8e-9 * record["bytes"] / record["each"],
                    }
                )
    return found


def measure_crowd(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each of the larger sizes, with every host's link saturated both ways."""
    sizes = [str(nbytes) for nbytes in CROWD_SIZES]
    program = ["-m", "benchmarks.programs.messages", "--bytes", *sizes, "--all-at-once"]
    program += ["--count", "4", "--repeats", str(args.repeats)]
    with Lab(hosts=1 + max(CROWD_RANKS), rate_gbit=args.rate) as lab:
        records = harness.json_printed(lab.run(CROWD_RANKS, program, timeout=LIMIT))
    each = CROWD_RANKS.count(0)
    flows = each * (len(CROWD_RANKS) - each)
    return [
        {
            "path": CROWD,
            "bytes": record["bytes"],
            "one, ms": None,
            "each, ms": 1e3 * record["each"],
            "each, Gbit/s": 8e-9 * flows * record["bytes"] / record["each"],
        }
        for record in records
    ]


def constants(table: Sequence[Mapping[str, Any]], path: str) -> dict[str, float]:
    """Return the Gbit/s and microseconds of one path."""
    rows = {row["bytes"]: row for row in table if row["path"] == path}
    rate = float(rows[SIZES[-1]]["each, Gbit/s"])
    middle, wire = rows[SIZES[-2]], 8e-6 * SIZES[-2] / rate
    return {
        "rate, Gbit/s": rate,
        "latency, us": 1e3 * (float(middle["one, ms"]) - wire),
        "overhead, us": 1e3 * (float(middle["each, ms"]) - wire),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = harness.make_parser(
        "calibration", "Measure rate and latency of messages in the network lab."
    )
    parser.add_argument(
        "--rate", type=positive, default=1.0, help="rate of each host's link in Gbit/s"
    )
    parser.add_argument(
        "--repeats",
        type=whole(),
        default=9,
        help="number of measurements of which the median is taken",
    )
    args = parser.parse_args(argv)
    facts = machine()
    table = measure(args)
    lines = [
        f"{path}: " + ", ".join(f"{name} {value:.4g}" for name, value in found.items())
        for path in PATHS
        for found in [constants(table, path)]
    ]
    table += measure_crowd(args)
    notes = NOTES + "\n\n" + "\n".join(f"- {line}" for line in lines)
    title = f"Messages between two ranks, links of {args.rate:g} Gbit/s"
    return harness.publish("calibration", argv, args, facts, harness.Findings(title, table, notes))


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
