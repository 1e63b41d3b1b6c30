"""Compute each algorithm's sample efficiency, for `aladdin_mpi.advise`, from stored runs.

    python -m benchmarks.learned                # prints it
    python -m benchmarks.learned --write        # writes aladdin_mpi/advice/learned.toml

The runs are those of `benchmarks.convergence` in benchmarks/results/convergence.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

import tomli_w

from aladdin_mpi.advice import learning
from aladdin_mpi.advice.learning import EfficiencyRow, curve, mean_curve, taught
from aladdin_mpi.options.run import SimulateOptions
from aladdin_mpi.options.settings import build
from aladdin_mpi.options.toml_file import read_toml
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
    "longer",
    "longer-16-workers",
    "ahead-longer-8-workers",
    "ahead-longer-16-workers",
)
"""Parts to use. Longer runs replace shorter ones; if equally long, more seeds, then the later."""
CONVERGED = 24.0
"""Epochs from which runs end near convergence: the loss hardly falls in their last third."""
BASES = ("ar-sgd-nesterov", "ar-sgd")
PLAIN = {"ssp-3": "ssp"}
"""Names of the variants that are an algorithm's defaults."""
HEAD = """\
# Sample efficiency relative to synchronous SGD (ar-sgd) with as many workers: samples that ar-sgd
# needs for the training loss that it has after 70 % of them, over those that the algorithm needs
# for it; for the loss that it ends with, if it does not get there. ResNet-20 on CIFAR-10, batch 32
# for each worker, by number of workers. share: the mean over the seeds; low and high: the lowest
# and the highest of them; steps: the length of the runs; converged: these took 24 epochs and ended
# near convergence, the others took 4. A figure above 1 is kept only if the runs ended near
# convergence and every seed is above 1; otherwise it is capped at 1. From the runs in
# benchmarks/results/convergence:
#     python -m benchmarks.learned --write

"""


def row_of(runs: Sequence[Path], bases: Sequence[Path]) -> EfficiencyRow:
    """Return the sample efficiency of runs, each relative to the base's run with the same seed.

    Only the runs with the most metrics lines count: others are too coarse to locate a loss.
    """
    curves = [{run.name: mean_curve([curve(run)]) for run in each} for each in (runs, bases)]
    most = max(len(points) for each in curves for points in each.values())
    mine, base = ({s: c for s, c in each.items() if len(c) == most} for each in curves)
    options = options_of(runs[0])
    converged = (options.epochs or 0.0) >= CONVERGED
    shares = [taught(mine[seed], base[seed]) for seed in sorted(mine.keys() & base.keys())]
    found = [round(share, 3) for share in learning.credited(shares, converged)]
    samples = curve(runs[0])[-1][0]
    steps = round(samples / (options.workers * options.batch_size))
    return EfficiencyRow(
        round(fmean(found), 3), min(found), max(found), len(found), steps, converged
    )


def options_of(run: Path) -> SimulateOptions:
    """Return the options of a run."""
    return build(SimulateOptions, read_toml(SimulateOptions, run / "config.toml", "run"))


def table() -> dict[str, dict[str, EfficiencyRow]]:
    """Return the sample efficiencies by algorithm and number of workers."""
    found: dict[str, dict[str, EfficiencyRow]] = defaultdict(dict)
    for group in GROUPS:
        folders = {
            path.name: sorted(path.glob("seed-*"))
            for path in RUNS.joinpath(group, "runs").iterdir()
        }
        base = folders[next(b for b in BASES if b in folders)]
        for name, runs in folders.items():
            algorithm = PLAIN.get(name, name)
            if (
                name in BASES
                or not algorithm.replace("-", "").isalpha()
                or algorithm.endswith("dgc")
            ):
                continue
            workers = str(options_of(runs[0]).workers)
            row, known = row_of(runs, base), found[algorithm].get(workers)
            if known is None or (row.steps, row.seeds) >= (known.steps, known.seeds):
                found[algorithm][workers] = row
    return {
        name: dict(sorted(of.items(), key=lambda each: int(each[0])))
        for name, of in sorted(found.items())
    }


def written() -> str:
    """Return the file's text."""
    rows = {name: {n: asdict(row) for n, row in of.items()} for name, of in table().items()}
    return HEAD + tomli_w.dumps(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(description="Compute the sample efficiency of each algorithm.")
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    args = parser.parse_args(argv)
    text = written()
    print(text)
    if args.write:
        FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
