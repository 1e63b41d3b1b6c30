"""Compare how messages share links in the network lab and in the simulator, without training.

    python -m benchmarks.sharing --check --save
    python -m benchmarks.sharing --quick

Eight ranks on four hosts all send to four of them at the same time, and the arrival of each message
is recorded. The simulator's `--sharing tcp` (`transport/virtual/network.py`) was set from these
traces, before training was compared (`benchmarks.agreement`). Requires the network lab and root.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any, Literal

from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from benchmarks import harness
from benchmarks.bounds import whole
from benchmarks.engines import GOODPUT, LINKS
from benchmarks.lab import Lab
from benchmarks.machine import machine
from benchmarks.programs.crowd import CASES, RANKS, crowd

NAME = "sharing"
RATE = 1.0
LIMIT = 300.0
SHARES = (0.1, 0.5, 0.9, 1.0)
BAR = 0.2
"""Largest relative error of the simulation, in each figure except the last message's."""
LATE = 0.1
"""Seconds after the median of the last ones from which a message counts as sent again."""

NOTES = f"""\
Messages end: the time, in ms from the start, at which a tenth, half, nine tenths and all of them
have arrived; means over the repetitions. Senders end: the first and the last but one of the eight
whose messages have all arrived. Sent again: messages that arrived {1e3 * LATE:.0f} ms or more after
the usual end, as a share of all bursts from one rank to another. The last message's time depends on
whether there is one of those. Even: a simulation with links that serve their flows in turn."""


def in_the_lab(repeats: int) -> list[dict[str, Any]]:
    """Return the records over MPI."""
    program = ["-m", "benchmarks.programs.crowd", "--repeats", str(repeats)]
    with Lab(hosts=1 + max(RANKS), rate_gbit=RATE) as lab:
        found: list[dict[str, Any]] = harness.json_printed(lab.run(RANKS, program, timeout=LIMIT))
    return found


def in_virtual_time(sharing: Literal["even", "tcp"], repeats: int) -> list[dict[str, Any]]:
    """Return the simulated records, with the network modelled as in `benchmarks.agreement`."""
    links = {name.removeprefix("--").replace("-", "_"): value for name, value in LINKS.items()}
    described: dict[str, Any] = {**links, "bandwidth_gbit": RATE * GOODPUT, "sharing": sharing}
    hosts = 1 + max(RANKS)
    cluster = Cluster(hosts=hosts, placement="block", **described)
    found = VirtualCluster(len(RANKS), cluster).run(lambda transport: crowd(transport, repeats))
    return found[0] or []


def rows_of(where: str, records: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Return a row for each message size."""
    for nbytes, count in CASES:
        mine = [r for r in records if (r["bytes"], r["count"]) == (nbytes, count)]
        ends = [record["ends"] for record in mine]
        usual = sorted(each[-1] for each in ends)[len(ends) // 2]
        late = sum(any(end > usual + LATE for end in each) for each in ends)
        bursts = len(ends) * len(ends[0]) / count
        yield {
            "messages": f"{count} of {nbytes / 1e6:g} MB",
            "where": where,
            **{
                f"{share:.0%}, ms": 1e3 * fmean(each[int(share * (len(each) - 1))] for each in ends)
                for share in SHARES
            },
            "first sender, ms": 1e3 * fmean(record["senders"][0] for record in mine),
            "seventh, ms": 1e3 * fmean(record["senders"][-2] for record in mine),
            "sent again": late / bursts,
        }


def missed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the figures of `--sharing tcp` that are too far from the lab's."""
    found = []
    by_place = {(row["messages"], row["where"]): row for row in rows}
    for (messages, where), row in by_place.items():
        if where != "tcp":
            continue
        real = by_place[messages, "lab"]
        for name in ("10%, ms", "50%, ms", "90%, ms", "first sender, ms", "seventh, ms"):
            error = row[name] / real[name] - 1
            if abs(error) > BAR:
                found.append(f"{messages}: {name}: {error:+.1%} off, expected at most {BAR:.0%}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = harness.make_parser(
        NAME, "Compare how messages share links in the lab and in the simulator."
    )
    parser.add_argument("--repeats", type=whole(), default=60, help="repetitions of each size")
    parser.add_argument("--quick", action="store_true", help="three of each")
    args = parser.parse_args(argv)
    repeats = 3 if args.quick else args.repeats
    facts = machine()
    rows = list(rows_of("lab", in_the_lab(repeats)))
    rows += rows_of("tcp", in_virtual_time("tcp", repeats))
    rows += rows_of("even", in_virtual_time("even", repeats))
    rows.sort(key=lambda row: row["messages"])
    title = f"Eight ranks on four hosts that all send at the same time, links of {RATE:g} Gbit/s"
    findings = harness.Findings(title, rows, NOTES, missed(rows))
    return harness.publish(NAME, argv, args, facts, findings)


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
