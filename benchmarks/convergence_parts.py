"""What `benchmarks.convergence` compares: the networks, the parts and their runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from aladdin_mpi.algorithms.registry import find
from benchmarks.spread import spread

HOSTS = 4
PUBLISHED_WORKERS = 8
GBIT = 10.0
BATCH = 32
JITTER = 0.05
"""Standard deviation of a step's time over its mean."""


@dataclass(frozen=True)
class Stand:
    """A small network in the place of a large one.

    Args:
        model: of `aladdin_mpi.simulate`; ``megabytes`` its parameters.
        original: what it stands for, of ``original_mb``; its step takes ``seconds``.
        published: for each algorithm the test accuracy and the hours to 90 % in table 2. The
            study's SGP overlaps its messages with a step, which is `osgp` here.
    """

    model: str
    megabytes: float
    original: str
    original_mb: float
    seconds: float
    published: Mapping[str, tuple[float, float]]

    @property
    def scale(self) -> float:
        """The size of the small one over that of the large one."""
        return self.megabytes / self.original_mb

    def options(self) -> list[str]:
        """Time and network, such that communication takes its share of a step."""
        values = {
            "--compute-time": self.seconds,
            "--hosts": HOSTS,
            "--bandwidth-gbit": GBIT * self.scale,
            "--bucket-mb": 4 * self.scale,
            "--shard-mb": 16 * self.scale,
        }
        return [str(word) for pair in values.items() for word in pair]


RESNET = Stand(
    "resnet20",
    1.09,
    "ResNet-50",
    94.0,
    0.447,
    {
        "ar-sgd": (93.53, 0.98),
        "asp": (93.15, 1.16),
        "easgd": (91.12, 1.36),
        "osgp": (93.40, 1.15),
        "aladdin": (93.78, 0.92),
    },
)
VGG = Stand(
    "vgg8_cifar",
    15.7,
    "VGG-16",
    552.0,
    0.849,
    {
        "ar-sgd": (92.38, 6.40),
        "asp": (91.71, 8.22),
        "easgd": (91.24, 6.18),
        "osgp": (92.28, 3.94),
        "aladdin": (92.26, 2.87),
    },
)
STANDS = {"resnet": RESNET, "vgg": VGG}

EVERYONE = ("ar-sgd", "asp", "easgd", "sgp", "osgp", "aladdin")
PAIR = ("aladdin", "ar-sgd")
AT_THE_END = "ar-sgd, no overlap"
"""It sums the gradient when backward is over."""

LOOKING_AHEAD = {"pi 2, lookahead": "aladdin --aladdin-pi 2 --aladdin-lookahead 0.5"}
"""Not in the paper; learns better where the links have room for twice as many models."""

ABLATION = {
    "ar-sgd": "ar-sgd",
    "aladdin": "aladdin",
    "drop": "aladdin --aladdin-trigger drop",
    "alpha since-last": "aladdin --aladdin-alpha since-last",
    "alpha literal": "aladdin --aladdin-alpha literal",
    "normalize count": "aladdin --aladdin-normalize count",
    "momentum split": "aladdin --aladdin-momentum split",
    "pi 1": "aladdin --aladdin-pi 1",
    "pi 2": "aladdin --aladdin-pi 2",
    "pi 8": "aladdin --aladdin-pi 8",
    "lookahead": "aladdin --aladdin-lookahead 0.5",
    "pi 1, lookahead": "aladdin --aladdin-pi 1 --aladdin-lookahead 0.5",
    **LOOKING_AHEAD,
    "lr half": "aladdin --lr {half}",
    "lr twice": "aladdin --lr {twice}",
    "ar-sgd lr twice": "ar-sgd --lr {twice}",
    "momentum 0.5": "aladdin --momentum 0.5 --lr {five}",
}
"""``{half}``, ``{twice}`` and ``{five}`` stand for multiples of the learning rate. Five times:
with a momentum of 0.5 a gradient moves the model as far in all as with 0.9."""


@dataclass(frozen=True)
class Part:
    """One comparison: of algorithms, or of variants of them.

    Args:
        name: in the table, and of its folder.
        stand: the network.
        workers: of each run.
        runs: for each label in the table the algorithm and its options.
        share: of the epochs.
        seeds: runs of each.
        published: whether it is a part of the paper's table 2.
    """

    name: str
    stand: Stand
    workers: int
    runs: Mapping[str, str]
    share: float = 1.0
    seeds: int = 1
    published: bool = False

    @property
    def ours(self) -> str:
        """The run of ALADDIN that the others are compared with."""
        return next(label for label in ("aladdin-ahead", "aladdin") if label in self.runs)

    @property
    def base(self) -> str | None:
        """The synchronous run, if there is one."""
        return next((label for label in (NESTEROV, "ar-sgd") if label in self.runs), None)

    @property
    def labels(self) -> list[str]:
        """What the runs are called in the table."""
        return list(self.runs)

    def command(self, args: argparse.Namespace, folder: Path) -> list[str]:
        """That of `aladdin_mpi.compare`."""
        own = {"--workers": self.workers, "--out": folder, "--jobs": args.jobs}
        words = [sys.executable, "-m", "aladdin_mpi.compare"]
        words += [str(word) for pair in own.items() for word in pair]
        words += ["--seeds", *map(str, range(self.seeds))]
        words += ["--target-accuracy", str(args.target)]
        words += ["--variants", *(f"{slug(n)}={_placed(o)}" for n, o in self.runs.items())]
        run = {
            "--model": self.stand.model,
            "--epochs": args.epochs * self.share,
            "--batch-size": BATCH,
            "--lr": args.lr,
            "--warmup-epochs": min(1.0, args.epochs * self.share / 8),
            "--eval-every": args.eval_every,
            "--servers": HOSTS,
            "--jitter": JITTER,
        }
        if NESTEROV in self.runs:
            run["--log-every"] = LOG_EVERY
        words += ["--", *(str(word) for pair in run.items() for word in pair)]
        return [*words, *self.stand.options(), *args.data]


def _placed(run: str) -> str:
    """An algorithm and its options, with the placement by which the other benchmarks run it."""
    algorithm = run.split()[0]
    return f"{run} --placement {spread(HOSTS if find(algorithm).server else 0)}"


def plainly(algorithms: Sequence[str]) -> dict[str, str]:
    """Runs of algorithms with their defaults, labelled by their names."""
    return {name: name for name in algorithms}


def slug(name: str) -> str:
    """A name as that of a folder."""
    return name.replace(",", "").replace(" ", "-")


VGG_RUNS = {
    **plainly(EVERYONE),
    AT_THE_END: "ar-sgd --no-wait-free",
    "pi 2": "aladdin --aladdin-pi 2",
    **LOOKING_AHEAD,
}
PAIR_AHEAD = {**plainly(PAIR), **LOOKING_AHEAD}

NESTEROV = "ar-sgd, nesterov"
"""The fair base for an algorithm that looks ahead."""
AHEAD = {"aladdin-ahead": "aladdin-ahead", NESTEROV: "ar-sgd --nesterov"}

SPREAD_SEEDS = 3
"""Of the parts spread and ahead, at least."""
LOG_EVERY = 6250
"""Samples between two lines of training loss, where it is compared."""

NAMES = ("resnet", "vgg", "longer", "ablation", "spread", "workers", "ahead")
"""What `--parts` takes."""


def parts(args: argparse.Namespace) -> list[Part]:
    """The comparisons that were asked for."""
    workers = args.workers
    resnet, vgg = args.stands["resnet"], args.stands["vgg"]
    rates = {
        name: f"{args.lr * times:g}" for name, times in (("half", 0.5), ("twice", 2), ("five", 5))
    }
    ablation = {name: text.format(**rates) for name, text in ABLATION.items()}
    like_table = workers == PUBLISHED_WORKERS
    known = {
        "resnet": [Part("resnet", resnet, workers, plainly(EVERYONE), published=like_table)],
        # Its steps take two to three times as long to compute.
        "vgg": [Part("vgg", vgg, workers, VGG_RUNS, share=0.5, published=like_table)],
        "longer": [
            Part("longer", resnet, workers, plainly(PAIR), share=3.0),
            *(
                Part(f"longer, {count} workers", resnet, count, PAIR_AHEAD, share=3.0)
                for count in args.more_workers[:1]
            ),
        ],
        "ablation": [Part("ablation", resnet, workers, ablation, share=0.5)],
        "spread": [Part("spread", resnet, workers, plainly(PAIR), share=0.5, seeds=SPREAD_SEEDS)],
        "workers": [
            Part(f"{count} workers", resnet, count, plainly(PAIR), share=0.5)
            for count in args.more_workers
        ],
        "ahead": [
            Part(f"ahead, {count} workers", resnet, count, AHEAD, share=0.5, seeds=SPREAD_SEEDS)
            for count in (workers, *args.more_workers)
        ],
    }
    chosen = [part for name in args.parts for part in known[name]]
    return [replace(part, seeds=max(part.seeds, args.seeds)) for part in chosen]
