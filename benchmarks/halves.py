"""In which half of a run `aladdin-ahead` loses accuracy: halves of it and of synchronous SGD.

    python -m benchmarks.halves --data-dir cifar10 --out runs/halves --save
    python -m benchmarks.halves --quick

Both rules train the first half of a run. Synchronous SGD continues either model with a rate that
falls to zero within a tenth of the run, which shows what that half has learned, or over the second
half; so does `aladdin-ahead`. Finished phases are kept in the folder `--out`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from aladdin_mpi.errors import UserError
from aladdin_mpi.hooks.recorder import read_metrics
from benchmarks import harness, quick
from benchmarks.bounds import whole
from benchmarks.harness import Findings
from benchmarks.learning.part import BATCH, JITTER
from benchmarks.learning.stands import HOSTS, RESNET
from benchmarks.machine import machine
from benchmarks.spread import spread

PROGRAM = Path(__file__).parent / "programs" / "halves.py"
AHEAD = ("--algorithm", "aladdin-ahead", "--placement", spread(HOSTS))
SYNC = ("--algorithm", "ar-sgd", "--nesterov", "--placement", spread(0))
HALF, COOLED, END = 0.5, 0.6, 1.0
"""Shares of the samples at which phases end."""
QUICK = {"samples": 512, "seeds": [0], "workers": 4}

TITLE = "Halves of aladdin-ahead and of synchronous SGD"
NOTES = f"""\
ResNet-20 on CIFAR-10 in fp32, {{workers}} workers, {{samples}} samples, batches of {BATCH}, the
timing of benchmarks.convergence; the peak rate is reached after an eighth of the samples and falls
along half a cosine. Seeds: {{seeds}}. Synchronous: `ar-sgd --nesterov`. "cooled": the rate falls to
zero within a tenth of the run. "A / B": the loss of A divided by that of B with the same seed, the
mean and in parentheses the standard deviation over the seeds; accuracy: A minus B in points. Test
loss and accuracy are those of the trained model, the training loss is that of the last tenth of
the samples of a whole run."""


@dataclass(frozen=True)
class Phase:
    """A part of a run: its rule, its samples as shares of the whole run, and its first model."""

    name: str
    rule: Sequence[str]
    last: float
    start: Phase | None = None

    def folder(self, out: Path, seed: int) -> Path:
        """Return its run folder."""
        return out / f"seed-{seed}" / self.name


FIRST_AHEAD = Phase("ahead", AHEAD, HALF)
FIRST_SYNC = Phase("sync", SYNC, HALF)
AHEAD_COOLED = Phase("ahead-cooled", SYNC, COOLED, FIRST_AHEAD)
SYNC_COOLED = Phase("sync-cooled", SYNC, COOLED, FIRST_SYNC)
AHEAD_AHEAD = Phase("ahead-ahead", AHEAD, END, FIRST_AHEAD)
AHEAD_SYNC = Phase("ahead-sync", SYNC, END, FIRST_AHEAD)
SYNC_SYNC = Phase("sync-sync", SYNC, END, FIRST_SYNC)
COMPARISONS = {
    "aladdin-ahead, cooled / synchronous, cooled": (AHEAD_COOLED, SYNC_COOLED),
    "aladdin-ahead / synchronous": (AHEAD_AHEAD, SYNC_SYNC),
    "aladdin-ahead, then synchronous / synchronous": (AHEAD_SYNC, SYNC_SYNC),
    "aladdin-ahead / aladdin-ahead, then synchronous": (AHEAD_AHEAD, AHEAD_SYNC),
}


@dataclass(frozen=True)
class Settings:
    """The settings of all runs; ``data`` is a folder or "digits"."""

    out: Path
    samples: int
    workers: int
    data: str


@dataclass(frozen=True)
class Result:
    """The results of a phase."""

    test: float
    training: float
    accuracy: float


def result(phase: Phase, seed: int, settings: Settings) -> Result:
    """Return the results of a phase, which is run if it is not in the folder."""
    folder = phase.folder(settings.out, seed)
    if not (folder / "summary.json").exists():
        _simulate(phase, seed, settings)
    lines = read_metrics(folder)
    evaluation = [line for line in lines if line["kind"] == "eval"][-1]
    losses = [line["loss"] for line in lines if line["kind"] == "train"][-3:]
    return Result(evaluation["test_loss"], fmean(losses), evaluation["test_accuracy"])


def _simulate(phase: Phase, seed: int, settings: Settings) -> None:
    folder, start, model = phase.folder(settings.out, seed), 0.0, []
    if phase.start is not None:
        result(phase.start, seed, settings)
        start, model = phase.start.last, [str(phase.start.folder(settings.out, seed) / "model.pt")]
    bounds = [round(settings.samples * share) for share in (start, phase.last)]
    shape = "falls" if phase.last == COOLED else "follows"
    own = ["--workers", settings.workers, "--servers", HOSTS, "--jitter", JITTER]
    arguments = [folder, seed, settings.samples, *bounds, shape, settings.data, *model]
    words = [*phase.rule, *own, *RESNET.options(), "--overwrite", "--", *arguments]
    command = [sys.executable, "-m", "aladdin_mpi.simulate", PROGRAM, *words]
    subprocess.run([str(word) for word in command], check=True)


def row(name: str, seeds: Sequence[int], settings: Settings) -> dict[str, Any]:
    """Return a row of the table."""
    ours, base = COMPARISONS[name]
    pairs = [(result(ours, seed, settings), result(base, seed, settings)) for seed in seeds]
    return {
        "A / B": name,
        "test loss": _spread([a.test / b.test for a, b in pairs]),
        "training loss": _spread([a.training / b.training for a, b in pairs]),
        "accuracy": _spread([100 * (a.accuracy - b.accuracy) for a, b in pairs]),
    }


def _spread(values: Sequence[float]) -> str:
    deviation = f" ({stdev(values):.4f})" if len(values) > 1 else ""
    return f"{fmean(values):.4f}{deviation}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = harness.make_parser("halves", (__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--data-dir", type=Path, help="CIFAR-10 as folders of images: train/CLASS and test/CLASS")
    add("--out", type=Path, metavar="FOLDER", help="folder for the finished phases")
    add("--seeds", type=whole(0), nargs="+", default=[0, 1, 2], help="seeds of the runs")
    add("--samples", type=whole(64), default=200_000, help="samples of a whole run")
    add("--workers", type=whole(HOSTS), default=8, help="number of workers")
    args = quick.parse(parser, argv, QUICK)
    if args.data_dir is None and not args.quick:
        raise UserError("--data-dir: expected a folder with CIFAR-10, got none; or give --quick")
    facts = machine()
    with tempfile.TemporaryDirectory(prefix="halves-") as temporary:
        out, data = args.out or Path(temporary), args.data_dir
        found = Settings(
            out.resolve(), args.samples, args.workers, str(data.resolve()) if data else "digits"
        )
        rows = [row(name, args.seeds, found) for name in COMPARISONS]
    notes = NOTES.format(workers=args.workers, samples=args.samples, seeds=args.seeds)
    return harness.publish("halves", argv, args, facts, Findings(TITLE, rows, notes))


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
