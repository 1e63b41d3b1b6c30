"""Measure the time that ALADDIN's communication adds to a worker's step on one machine.

    python -m benchmarks.step --save --check
    python -m benchmarks.step --model resnet50 --pixels 224 --steps 2 --repeats 3 --save
    python -m benchmarks.step --quick

One server and one worker on this machine, which needs a core for each. The same model on the same
batch, alternating: plain torch, the same arithmetic on this project's flat vectors, and ALADDIN.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks import harness, quick
from benchmarks.bounds import positive, whole
from benchmarks.machine import machine

PROGRAM = "benchmarks.programs.step"
PIXELS = 32
"""Pixels of an image's side by default."""
BAR = 1.02
"""Longest step, as a multiple of the same without communication."""
PLAIN = ("alone", "flat", "busy")
COMPUTED = {"aladdin": PLAIN, "aladdin-ahead": PLAIN, "aladdin timed": ("sleep",)}
"""Each case with communication, and the cases without (the shortest counts) for comparison."""

Record = Mapping[str, Any]
NOTES = """\
The cases alternate. Figures are medians over repeats of the mean step of one turn, on the slowest
worker, without the last step, which ends a run. alone: forward, backward and torch's SGD on a fixed
batch; flat: the same with the flat vectors and the optimizer of this project, without sending;
busy: as alone, while an empty loop occupies the core that the server has in the case aladdin, which
shows the effect of two cores of this machine on each other; aladdin: training with ALADDIN through
the public interface. Freed memory is kept for the next step in all cases
(`aladdin_mpi.process.heap`). Timed: a step is a sleep, and messages of the model's size are sent.
The ratio is relative to the shortest case without communication; busy ratio: relative to busy; over
aladdin and added: the cost of aladdin-ahead's rule relative to ALADDIN's step, including its 8-bit
messages."""
QUICK = {"model": ["digits"], "batch": 2, "steps": 3, "repeats": 1, "compute_time": 0.01}


def measure(args: argparse.Namespace) -> list[Record]:
    """Return all records of the program."""
    cases = dict.fromkeys(case for with_, without in COMPUTED.items() for case in (*without, with_))
    options = {
        "--model": args.model,
        "--case": cases,
        "--batch": [args.batch],
        "--pixels": [args.pixels],
        "--steps": [args.steps],
        "--compute-time": [args.compute_time],
        "--repeats": [args.repeats],
    }
    words = [word for name, values in options.items() for word in (name, *map(str, values))]
    done = harness.run_here(1 + args.workers, ["-m", PROGRAM, *words], args.limit)
    records: list[Record] = harness.json_printed(done)
    return records


def rows(records: Sequence[Record], workers: int) -> list[dict[str, Any]]:
    """Return the table: for each model one row with computing and one with sleeping."""
    found = []
    for model in dict.fromkeys(record["model"] for record in records):
        aladdin = _seconds(records, model, "aladdin")
        for case, others in COMPUTED.items():
            times = {each: _seconds(records, model, each) for each in others}
            mine, least = _seconds(records, model, case), min(times.values())
            found.append(
                {
                    "workers": workers,
                    "model": model,
                    "case": case,
                    "step, ms": 1e3 * mine,
                    "without communication, ms": 1e3 * least,
                    "ratio": mine / least,
                    "busy ratio": mine / times["busy"] if "busy" in times else None,
                    **_added(case, mine, aladdin),
                    **{f"{each}, ms": 1e3 * seconds for each, seconds in times.items()},
                }
            )
    return found


def _added(case: str, seconds: float, aladdin: float) -> dict[str, float | None]:
    """Return the time that aladdin-ahead's rule adds to ALADDIN's step."""
    if case != "aladdin-ahead":
        return {"over aladdin": None, "added, ms": None}
    return {"over aladdin": seconds / aladdin, "added, ms": 1e3 * (seconds - aladdin)}


def _seconds(records: Sequence[Record], model: str, case: str) -> float:
    return median(r["seconds"] for r in records if (r["model"], r["case"]) == (model, case))


def missed(table: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a description of each row that exceeds the bar."""
    found = []
    for row in table:
        ratio, others = row["ratio"], "one without communication"
        if row["over aladdin"] is not None:
            ratio, others = row["over aladdin"], "ALADDIN's"
        if ratio > BAR:
            found.append(
                f"{row['model']}, {row['case']}: a step takes {ratio:.3f} of {others}, expected at "
                f"most {BAR:g}"
            )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = harness.make_parser(
        "step", "Measure the time that ALADDIN's communication adds to a step."
    )
    add = parser.add_argument
    most = max(1, (os.cpu_count() or 2) - 1)
    add(
        "--workers",
        type=whole(),
        default=1,
        help=f"number of workers with one server; here at most {most}",
    )
    add("--model", nargs="+", default=["resnet56", "vgg16_bn_cifar"], help="image models")
    add("--batch", type=whole(), default=8, help="samples per step")
    add("--pixels", type=whole(), default=PIXELS, help="pixels of an image's side")
    add("--steps", type=whole(), default=20, help="number of steps in one measurement")
    add("--compute-time", type=positive, default=0.2, help="duration of a timed step in s")
    add(
        "--repeats",
        type=whole(),
        default=9,
        help="number of measurements of which the median is taken",
    )
    add("--limit", type=positive, default=1800.0, help="time limit of a run in s")
    args = quick.parse(parser, argv, QUICK)
    facts = machine()
    table = rows(measure(args), args.workers)
    title = "A worker's step with ALADDIN and without communication"
    case = "" if args.pixels == PIXELS else f"{args.pixels}-pixels"
    found = harness.Findings(title, table, NOTES, missed(table))
    return harness.publish("step", argv, args, facts, found, case)


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
