"""What a step takes whose batch is loaded beside the one before.

python -m benchmarks.feed --save --check
python -m benchmarks.feed --quick
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks import harness, quick
from benchmarks.bounds import positive, whole
from benchmarks.machine import machine

PROGRAM = "benchmarks.programs.feed"
PROCESSES = (0, 1)
BAR = 1.05
"""Longest step, as a multiple of what it computes."""
NOTES = """\
One server and two workers on this machine. A step sleeps, as if a device computed, and loading a
batch sleeps too. Median over the steps of a run, on the slower worker, and over repeats. Without
loader processes a thread loads ahead; the first six steps do not count, as the first three batches
are loaded while the step waits."""
QUICK = {"steps": 3, "repeats": 1, "step": 0.02, "loading": 0.01}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = harness.make_parser("feed", "What a step takes whose batch is loaded beside.")
    add = parser.add_argument
    add("--step", type=positive, default=0.1, help="that a step computes, in s")
    add("--loading", type=positive, default=0.06, help="that a batch takes to load, in s")
    add("--steps", type=whole(), default=24, help="in one measurement")
    add("--repeats", type=whole(), default=5, help="of which medians are taken")
    add("--limit", type=positive, default=600.0, help="longest run, in s")
    args = quick.parse(parser, argv, QUICK)
    facts = machine()
    names = ("step", "loading", "steps", "repeats")
    words = [word for name in names for word in (f"--{name}", str(getattr(args, name)))]
    words += ["--processes", *map(str, PROCESSES)]
    done = harness.run_here(3, ["-m", PROGRAM, *words], args.limit)
    records = harness.json_printed(done)
    table = [_row(records, processes, args.step, args.loading) for processes in PROCESSES]
    missed = [
        f"{row['loader processes']} loader processes: a step takes {row['ratio']:.3f} of what it "
        f"computes, expected at most {BAR:g}"
        for row in table
        if row["ratio"] > BAR
    ]
    found = harness.Findings("Batches loaded beside the step", table, NOTES, missed)
    return harness.publish("feed", argv, args, facts, found)


def _row(records: Any, processes: int, step: float, loading: float) -> dict[str, Any]:
    seconds = median(r["seconds"] for r in records if r["processes"] == processes)
    return {
        "loader processes": processes,
        "computing, ms": 1e3 * step,
        "loading, ms": 1e3 * loading,
        "step, ms": 1e3 * seconds,
        "ratio": seconds / step,
    }


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
