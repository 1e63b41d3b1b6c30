"""What a sample teaches with each algorithm, for `aladdin_mpi.advise`: from the kept learning runs.

    python -m benchmarks.learned                # shows it
    python -m benchmarks.learned --write        # writes aladdin_mpi/advice/learned.toml

The runs are those that `benchmarks.convergence` has left in benchmarks/results/convergence.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from math import inf
from pathlib import Path
from statistics import fmean

import tomli_w

from aladdin_mpi.config.options import SimulateOptions
from aladdin_mpi.config.settings import build, read_toml
from benchmarks import harness

RUNS = Path(__file__).parent / "results" / "convergence"
FILE = Path(__file__).parent.parent / "aladdin_mpi" / "advice" / "learned.toml"
GROUPS = (
    "race",
    "ahead-8-workers",
    "ahead-16-workers",
    "ahead-24-workers",
    "ahead-64-workers",
    "16-workers",
    "24-workers",
    "ipdps-4-workers",
    "ipdps-8-workers",
    "ipdps-16-workers",
    "ipdps-24-workers",
)
"""Later ones go over earlier ones, but for those of more seeds."""
BASES = ("ar-sgd-nesterov", "ar-sgd")
PLAIN = {"ssp-3": "ssp"}
"""Names of variants that are an algorithm's defaults."""
HEAD = """\
# What a sample teaches, as a share of what it teaches synchronous SGD (ar-sgd) with as many
# workers: samples that ar-sgd needs for the training loss that it has after 70 % of them, over
# those that the algorithm needs for it; for the loss that it ends with, if it does not get there.
# ResNet-20 on CIFAR-10, 4 epochs, batch 32 for each worker. By number of workers; seeds: of the
# runs. From those in benchmarks/results/convergence:
#     python -m benchmarks.learned --write

"""

Curve = list[tuple[float, float]]
"""Samples, and the training loss after so many."""
LATE = 0.7
"""Share of the base's samples after which its loss is the goal: then rates still are large."""


def curve(run: Path) -> Curve:
    """The training loss of a run, of three lines together since one is noisy."""
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    points = [(line["samples"], line["loss"]) for line in lines if line["kind"] == "train"]
    known = [(float(samples), float(loss)) for samples, loss in points if loss is not None]
    return [
        (known[i][0], fmean(loss for _, loss in known[max(0, i - 2) : i + 1]))
        for i in range(len(known))
    ]


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Of several seeds, at the same samples; never rising."""
    least, found = inf, []
    for points in zip(*curves, strict=False):
        least = min(least, fmean(loss for _, loss in points))
        found.append((fmean(samples for samples, _ in points), least))
    return found


def mean_of(runs: Sequence[Path]) -> Curve:
    """Of the runs with the most lines: others say too little of where a loss was reached."""
    curves = [curve(run) for run in runs]
    most = max(map(len, curves))
    return mean_curve([each for each in curves if len(each) == most])


def samples_to(loss: float, of: Curve) -> float:
    """Samples after which a curve is down at a loss that it does reach."""
    before = of[0]
    for samples, reached in of:
        if reached <= loss:
            fall = before[1] - reached
            share = (before[1] - loss) / fall if fall > 0 else 0.0
            return before[0] + share * (samples - before[0])
        before = samples, reached
    raise ValueError(f"{loss} is not reached")


def taught(mine: Curve, base: Curve) -> float:
    """What a sample teaches, as a share of the base's: above 1 where it teaches more."""
    goal = next(loss for samples, loss in base if samples >= LATE * base[-1][0])
    goal = max(goal, mine[-1][1])
    return samples_to(goal, base) / samples_to(goal, mine)


def workers_of(run: Path) -> int:
    """The number of workers of a run."""
    options = build(SimulateOptions, read_toml(SimulateOptions, run / "config.toml", "run"))
    return options.workers


def table() -> dict[str, dict[str, dict[str, float]]]:
    """By algorithm and number of workers."""
    found: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for group in GROUPS:
        folders = {
            path.name: sorted(path.glob("seed-*"))
            for path in RUNS.joinpath(group, "runs").iterdir()
        }
        base = mean_of(folders[next(b for b in BASES if b in folders)])
        for name, runs in folders.items():
            algorithm = PLAIN.get(name, name)
            if (
                name in BASES
                or not algorithm.replace("-", "").isalpha()
                or algorithm.endswith("dgc")
            ):
                continue
            workers = str(workers_of(runs[0]))
            known = found[algorithm].get(workers)
            if known is not None and known["seeds"] > len(runs):
                continue
            share = taught(mean_of(runs), base)
            found[algorithm][workers] = {"share": round(share, 3), "seeds": len(runs)}
    return {
        name: dict(sorted(of.items(), key=lambda each: int(each[0])))
        for name, of in sorted(found.items())
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="What a sample teaches, by algorithm.")
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    args = parser.parse_args(argv)
    text = HEAD + tomli_w.dumps(table())
    print(text)
    if args.write:
        FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
