"""Measure a step whose batch is loaded during the previous step.

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
"""Longest step, as a multiple of its computing time."""
NOTES = """\
One server and two workers on this machine. A step sleeps, as if a device computed, and so does
loading a batch. Median over the steps of a run, on the slower worker, and over repeats. Without
loader processes a thread loads ahead. The first six steps do not count, because they wait for the
first three batches."""
QUICK = {"steps": 3, "repeats": 1, "step": 0.02, "loading": 0.01}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = harness.make_parser(
        "feed", "Measure a step whose batch is loaded during the previous one."
    )
    add = parser.add_argument
    add("--step", type=positive, default=0.1, help="computing time of a step in s")
    add("--loading", type=positive, default=0.06, help="loading time of a batch in s")
    add("--steps", type=whole(), default=24, help="number of steps in one measurement")
    add(
        "--repeats",
        type=whole(),
        default=5,
        help="number of measurements of which the median is taken",
    )
    add("--limit", type=positive, default=600.0, help="time limit of a run in s")
    args = quick.parse(parser, argv, QUICK)
    facts = machine()
    names = ("step", "loading", "steps", "repeats")
    words = [word for name in names for word in (f"--{name}", str(getattr(args, name)))]
    words += ["--processes", *map(str, PROCESSES)]
    done = harness.run_here(3, ["-m", PROGRAM, *words], args.limit)
    records = harness.json_printed(done)
    table = [_row(records, processes, args.step, args.loading) for processes in PROCESSES]
    missed = [
        f"{row['loader processes']} loader processes: a step takes {row['ratio']:.3f} of its "
        f"computing time, expected at most {BAR:g}"
        for row in table
        if row["ratio"] > BAR
    ]
    found = harness.Findings("Batches loaded during the step", table, NOTES, missed)
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
