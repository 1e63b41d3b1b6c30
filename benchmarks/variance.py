"""Measure the variance among the workers' models during training, by algorithm.

    python -m benchmarks.variance --save
    python -m benchmarks.variance --quick

Simulations on digits with real gradients and random step times. The measure is `model_variance` in
a run's metrics.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from aladdin_mpi.comparison.plots import style
from aladdin_mpi.hooks.recorder import read_metrics
from aladdin_mpi.options.run import SimulateOptions, parse
from aladdin_mpi.run.trainer import simulate
from benchmarks import harness, quick
from benchmarks.bounds import whole
from benchmarks.harness import Findings
from benchmarks.machine import machine
from benchmarks.results import RESULTS

ALGORITHMS = ("aladdin", "asp", "easgd", "gosgd", "ad-psgd", "local-sgd", "ar-sgd")
LR, JITTER, EVAL_EVERY = 0.01, 0.1, 0.25
LEAST = 1e-9
"""Smallest variance in the plot."""
QUARTERS = ("first quarter", "second", "third", "last")
Lines = Sequence[Mapping[str, Any]]
"""Evaluations of a run."""

TITLE = "Variance among the workers' models"
NOTES = f"""\
Digits, simulated, {{workers}} workers, {{epochs}} epochs, seeds: {{seeds}}, `--lr {LR}`. Step times
vary by {JITTER:.0%} (log-normal). Each algorithm has its defaults. Variance: of the workers' models
x_i, 1/n sum |x_i - mean x|^2 / |mean x|^2, the mean over the evaluations in that quarter of the
run, one every {EVAL_EVERY:g} epochs, and over the seeds. Accuracy: of the global model at the end,
in %. `local-sgd` is measured wherever it is between two averages."""
QUICK = {"algorithms": ["aladdin", "ar-sgd"], "epochs": 2, "seeds": 1, "workers": 4}


def train(algorithm: str, seed: int, args: argparse.Namespace) -> tuple[Lines, float]:
    """Return a run's evaluations and its final accuracy."""
    with tempfile.TemporaryDirectory(prefix="variance-") as folder:
        words = ["--algorithm", algorithm, "--workers", args.workers, "--epochs", args.epochs]
        words += ["--seed", seed, "--lr", LR, "--jitter", JITTER, "--eval-every", EVAL_EVERY]
        words += ["--quiet", "--run-dir", Path(folder) / "run"]
        summary = simulate(parse(SimulateOptions, [str(word) for word in words], "variance", ""))
        lines = [line for line in read_metrics(Path(folder) / "run") if line["kind"] == "eval"]
    return lines, float(str(summary["test_accuracy"]))


def by_quarter(lines: Lines, epochs: float) -> list[float]:
    """Return the mean variance in each quarter of a run."""
    found: list[list[float]] = [[] for _ in QUARTERS]
    for line in lines:
        # An evaluation at the end of a quarter belongs to it.
        place = math.ceil(len(QUARTERS) * line["epoch"] / epochs) - 1
        if line["model_variance"] is not None:
            found[min(place, len(QUARTERS) - 1)].append(line["model_variance"])
    return [fmean(values) if values else math.nan for values in found]


def row(algorithm: str, runs: Sequence[tuple[Lines, float]], epochs: float) -> dict[str, Any]:
    """Return a row of the table."""
    quarters = [by_quarter(lines, epochs) for lines, _ in runs]
    means = [fmean(values) for values in zip(*quarters, strict=True)]
    return {
        "algorithm": algorithm,
        **{name: f"{value:.2e}" for name, value in zip(QUARTERS, means, strict=True)},
        "accuracy": f"{100 * fmean(accuracy for _, accuracy in runs):.1f}",
    }


def draw(runs: Mapping[str, Sequence[tuple[Lines, float]]], path: Path) -> None:
    """Plot the variance over the epochs; algorithms with equal workers have no curve."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.4), layout="constrained")
    axis = figure.add_subplot()
    for place, (algorithm, seeds) in enumerate(runs.items()):
        look = {**style(place), "marker": None}
        for turn, (lines, _) in enumerate(seeds):
            shown = [line for line in lines if line["model_variance"]]
            x = [line["epoch"] for line in shown]
            y = [line["model_variance"] for line in shown]
            name = algorithm if shown else f"{algorithm}: 0"
            axis.plot(x, y, lw=1.0, alpha=0.8, label=None if turn else name, **look)
    axis.set_yscale("log")
    axis.set_ylim(bottom=LEAST)  # at the end, workers that receive a last model are almost equal
    axis.set_xlabel("epochs")
    axis.set_ylabel("variance among the workers' models")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": ""})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = harness.make_parser("variance", __doc__.splitlines()[0])
    add = parser.add_argument
    add("--algorithms", nargs="+", default=list(ALGORITHMS), metavar="NAME", help="which")
    add("--epochs", type=whole(), default=10, help="epochs of each run")
    add("--seeds", type=whole(), default=3, help="number of runs of each algorithm")
    add("--workers", type=whole(2), default=8, help="workers of each run")
    args = quick.parse(parser, argv, QUICK)
    facts = machine()
    runs = {
        name: [train(name, seed, args) for seed in range(args.seeds)] for name in args.algorithms
    }
    rows = [row(name, found, args.epochs) for name, found in runs.items()]
    if args.save is not None:
        args.save.mkdir(parents=True, exist_ok=True)
        draw(runs, args.save / "variance.png")
    notes = NOTES.format(**vars(args))
    if args.save == RESULTS:
        notes += "\n\n![Variance over the epochs](variance.png)"
    missed = [
        f"{name}: workers that are equal after every step have a variance"
        for name in {"bsp", "ar-sgd", "multistep"} & set(runs)
        if any(line["model_variance"] for lines, _ in runs[name] for line in lines)
    ]
    return harness.publish("variance", argv, args, facts, Findings(TITLE, rows, notes, missed))


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
