"""A comparison of `benchmarks.convergence`, as a command of `aladdin_mpi.compare`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aladdin_mpi.options.algorithms import find_algorithm
from benchmarks.learning.stands import HOSTS, Published, Stand
from benchmarks.spread import spread

BATCH = 32
JITTER = 0.05
"""Standard deviation of a step's time, relative to its mean."""
LOG_EVERY = 6250
"""Samples between two lines of training loss, if it is compared."""

NESTEROV = "ar-sgd, nesterov"
"""The fair baseline for an algorithm that looks ahead."""
_OURS = ("aladdin-ahead", "aladdin")
_BASES = (NESTEROV, "ar-sgd", "bsp")


@dataclass(frozen=True)
class Part:
    """A comparison of algorithms or of their variants.

    Args:
        name: name in the table, and of the folder.
        stand: the network.
        workers: workers of each run.
        runs: the algorithm and its options for each label in the table.
        share: share of the epochs.
        seeds: number of runs of each.
        published: accuracies and hours of a study, by label.
        hosts: number of hosts, each with a link and a server.
        rate: factor on the learning rate.
        slowdowns: slowdown factors of single workers.
        target: target accuracy from 0 to 1, if not that of the command line.
        warmup: epochs of warm-up, if not an eighth of all or one.
    """

    name: str
    stand: Stand
    workers: int
    runs: Mapping[str, str]
    share: float = 1.0
    seeds: int = 1
    published: Published = field(default_factory=dict)
    hosts: int = HOSTS
    rate: float = 1.0
    slowdowns: Mapping[int, float] = field(default_factory=dict)
    target: float | None = None
    warmup: float | None = None

    @property
    def ours(self) -> str:
        """The label of the run with which the others are compared at half of its time."""
        return next((label for label in _OURS if label in self.runs), self.labels[0])

    @property
    def base(self) -> str | None:
        """The label of the synchronous run, if there is one."""
        return next((label for label in _BASES if label in self.runs), None)

    @property
    def labels(self) -> list[str]:
        """Return the labels of the runs in the table."""
        return list(self.runs)

    def command(self, args: argparse.Namespace, folder: Path) -> list[str]:
        """Return the command line of `aladdin_mpi.compare`."""
        own = {"--workers": self.workers, "--out": folder, "--jobs": args.jobs}
        words = [sys.executable, "-m", "aladdin_mpi.compare"]
        words += [str(word) for pair in own.items() for word in pair]
        words += ["--seeds", *map(str, range(self.seeds))]
        words += ["--target-accuracy", str(self.target or args.target)]
        words += ["--variants", *(f"{slug(n)}={_placed(o)}" for n, o in self.runs.items())]
        return [*words, "--", *self._run(args), *self.stand.options(self.hosts), *args.data]

    def _run(self, args: argparse.Namespace) -> list[str]:
        """Return the options of all runs, except for the network and the data."""
        epochs = args.epochs * self.share
        run = {
            "--model": self.stand.model,
            "--epochs": epochs,
            "--batch-size": BATCH,
            "--lr": f"{args.lr * self.rate:g}",
            "--warmup-epochs": self.warmup or min(1.0, epochs / 8),
            "--eval-every": args.eval_every,
            "--servers": self.hosts,
            "--jitter": JITTER,
        }
        if NESTEROV in self.runs:
            run["--log-every"] = LOG_EVERY
        words = [str(word) for pair in run.items() for word in pair]
        slow = [f"{worker}={factor:g}" for worker, factor in self.slowdowns.items()]
        return [*words, *(["--slowdown", *slow] if slow else [])]


def _placed(run: str) -> str:
    """Return an algorithm and its options, with the same placement as in the other benchmarks."""
    algorithm = run.split()[0]
    return f"{run} --placement {spread(HOSTS if find_algorithm(algorithm).has_servers else 0)}"


def plainly(algorithms: Sequence[str]) -> dict[str, str]:
    """Return runs of algorithms with their defaults, labelled by their names."""
    return {name: name for name in algorithms}


def slug(name: str) -> str:
    """Return a name in the form of a folder's name."""
    return name.replace(",", "").replace(" ", "-")
