"""What a sample teaches with each algorithm, for `aladdin_mpi.advise`: from the kept learning runs.

    python -m benchmarks.learned                # shows it
    python -m benchmarks.learned --write        # writes aladdin_mpi/advice/learned.toml

The runs are those that `benchmarks.convergence` has left in benchmarks/results/convergence.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import tomli_w

from aladdin_mpi.advice.learning import Curve, curve, mean_curve, taught
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


def mean_of(runs: Sequence[Path]) -> Curve:
    """Of the runs with the most lines: others say too little of where a loss was reached."""
    curves = [curve(run) for run in runs]
    most = max(map(len, curves))
    return mean_curve([each for each in curves if len(each) == most])


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
