"""Whether DiLoCo's outer optimizer helps a single worker: real gradients.

    python -m benchmarks.lookahead --out runs/outer --save
    python -m benchmarks.lookahead --quick

With one worker, DiLoCo is Lookahead (Zhang et al., NeurIPS 2019) with Nesterov momentum in the
outer step. Finished runs are kept in the folder `--out`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks import harness, quick
from benchmarks.bounds import positive, whole
from benchmarks.harness import Findings
from benchmarks.machine import machine
from benchmarks.outer import Runs
from benchmarks.outer_cells import BATCH, Cell, Run

ROUNDS = (8, 32)
OUTER = ((0.5, 0.0), (0.7, 0.5), (0.7, 0.9), (1.0, 0.5))
"""Rates and momenta of the outer optimizer; the first is Lookahead's."""
PEAKS = (1.4e-3, 2e-3, 2.8e-3, 4e-3)
STEPS = 1600
QUICK = {"seeds": 1, "steps": 8, "rounds": [], "peaks": [PEAKS[0]]}

TITLE = "The outer optimizer of DiLoCo with one worker"
NOTES = f"""\
The GPT, AdamW and the schedule of benchmarks.outer with one worker, batches of {BATCH["gpt"]}.
Loss in nats per character on held-out samples at the end: mean and standard deviation over the
seeds. Each row has the peak rate that is best with seed 0 of those given by --peaks."""


def settings(rounds: Sequence[int], steps: int) -> dict[str, Run]:
    """Return runs by name: AdamW alone, and with each outer optimizer."""
    plain = Run(Cell(workers=1, link=1, steps=steps), "ar-sgd", (), PEAKS[0], 0)
    found = {"AdamW": plain}
    for number in rounds:
        for rate, momentum in OUTER:
            options = (
                ("--diloco-steps", str(number)),
                ("--diloco-outer-lr", f"{rate:g}"),
                ("--diloco-outer-momentum", f"{momentum:g}"),
            )
            name = f"outer step every {number}: rate {rate:g}, momentum {momentum:g}"
            found[name] = replace(plain, algorithm="diloco", options=options)
    return found


def row(name: str, run: Run, peaks: Sequence[float], seeds: int, runs: Runs) -> dict[str, Any]:
    """Return a row of the table, with the best of the peak rates."""
    tried = [replace(run, peak=peak) for peak in peaks]
    best = min(tried, key=lambda each: runs(each)["loss"] or inf)
    losses = [runs(replace(best, seed=seed))["loss"] for seed in range(seeds)]
    return {
        "setting": name,
        "peak rate": best.peak,
        "seeds": seeds,
        "loss": round(fmean(losses), 4),
        "sd": round(stdev(losses), 4) if seeds > 1 else None,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = quick.parse(_parser(), argv, QUICK)
    facts = machine()
    runs = Runs(args.out, None, facts.get("commit"))
    with ThreadPoolExecutor(args.jobs) as pool:
        calls = [
            pool.submit(row, name, run, args.peaks, args.seeds, runs)
            for name, run in settings(args.rounds, args.steps).items()
        ]
        rows = [call.result() for call in calls]
    return harness.publish("lookahead", argv, args, facts, Findings(TITLE, rows, NOTES))


def _parser() -> argparse.ArgumentParser:
    parser = harness.make_parser("lookahead", (__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, metavar="FOLDER", help="folder for the finished runs")
    add("--seeds", type=whole(1), default=3, help="number of runs of each setting")
    add("--steps", type=whole(8), default=STEPS, help="steps of a run")
    add("--rounds", type=whole(1), nargs="+", default=list(ROUNDS), help="steps per outer step")
    add("--peaks", type=positive, nargs="+", default=list(PEAKS), help="peak learning rates")
    add("--jobs", type=whole(1), default=2, help="number of simultaneous runs")
    return parser


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
