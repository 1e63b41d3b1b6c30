"""Compare the algorithms' accuracy over time with the timing of the ALADDIN paper's cluster.

    python -m benchmarks.convergence --data-dir cifar10 --out convergence --save
    python -m benchmarks.convergence --quick

Simulations with real gradients: a step takes as long as on the paper's cluster (8 workers on 4
hosts, CIKM 2021, section 5.1). The links are slower by the factor by which the models are smaller,
so that a gradient is in flight as long as there. Rerun the same command to resume: finished runs
are kept in the folder `--out`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aladdin_mpi.errors import UserError
from benchmarks import harness, quick
from benchmarks.bounds import folder, positive, share, whole
from benchmarks.learning.bars import missed
from benchmarks.learning.evaluations import Runs, evaluations
from benchmarks.learning.part import JITTER, Part, slug
from benchmarks.learning.parts import NAMES, parts
from benchmarks.learning.plot import draw
from benchmarks.learning.race import draw_race
from benchmarks.learning.stands import STANDS, Stand
from benchmarks.learning.table import rows
from benchmarks.machine import machine

LIMIT = 24 * 3600.0

TITLE = "Accuracy with the timing of the ALADDIN paper's cluster"
NOTES = """\
Published: table 2 of the paper (250 epochs on CIFAR-10 with ResNet-50 and VGG-16), and in the parts
ipdps tables II to IV of Ko et al. (IPDPS 2021; 90 epochs on ImageNet with ResNet-50). Here the
networks are smaller, epochs and seeds are those in the table, and times are those of the modelled
cluster. In the parts slow and race worker 0 is slower by the given factor; in part ashl workers 1,
2 and 3 are 2, 3 and 4 times slower. Accuracies in %; after a plus-minus sign half the distance
between the lowest and the highest seed. Accuracy in time: of the last evaluation before the time at
which ALADDIN has used half of its samples. To target: seconds until the accuracy in the column
before, interpolated linearly between the first evaluation at or above it and the one before;
between: the seconds of these two. Faster: the time to target of ar-sgd (with Nesterov's momentum,
if it was run) divided by this one's. Samples to loss: samples until the training loss that the same
ar-sgd has after 50 and 70 % of its samples, relative to ar-sgd; means over the seeds. Step times
vary by {jitter:.0%} (log-normal). Servers and workers are assigned to the hosts in turn; without
servers neighbours share a host. The study's SGP overlaps its messages with a step, which is `osgp`
here."""

QUICK = {"epochs": 2.0, "workers": 4, "more_workers": [], "target": 0.5, "parts": ["vgg"]}


def run(part: Part, args: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Start or resume the comparison; return its `comparison.json`."""
    folder = out / slug(part.name)
    done = subprocess.run(part.command(args, folder), timeout=LIMIT, stdout=sys.stderr)
    if done.returncode:
        raise UserError(f"{part.name}: the comparison failed with status {done.returncode}")
    found: dict[str, Any] = json.loads((folder / "comparison.json").read_text())
    return found


def _kept(parts: Sequence[Part], out: Path) -> list[Part]:
    """Return the parts with finished runs, reduced to these runs and their seeds."""
    found = []
    for part in parts:
        for seeds in range(part.seeds, 0, -1):
            done = {
                label: run for label, run in part.runs.items() if _done(part, label, seeds, out)
            }
            if done:
                found.append(replace(part, runs=done, seeds=seeds))
                break
    return found


def _done(part: Part, label: str, seeds: int, out: Path) -> bool:
    folder = out / slug(part.name) / "runs" / slug(label)
    return all((folder / f"seed-{seed}" / "summary.json").exists() for seed in range(seeds))


def title(part: Part, epochs: float) -> str:
    """Return the heading of a part's panel."""
    return (
        f"{part.name}: {part.stand.model}, {part.workers} workers, {epochs * part.share:g} epochs"
    )


def _parser() -> argparse.ArgumentParser:
    parser = harness.make_parser("convergence", "Compare the algorithms' accuracy over time.")
    add = parser.add_argument
    add("--data-dir", type=Path, help="CIFAR-10 as folders of images: train/CLASS and test/CLASS")
    add("--out", type=folder, help="folder for the runs; rerun the same command to resume")
    add(
        "--parts",
        nargs="+",
        choices=NAMES,
        default=list(NAMES),
        help="parts to run",
    )
    add(
        "--epochs",
        type=positive,
        default=8.0,
        help="epochs of part resnet; longer has three times as many, the others half",
    )
    add(
        "--seeds",
        type=whole(),
        default=1,
        help="smallest number of runs of each algorithm",
    )
    add("--workers", type=whole(2), default=8, help="workers of each run")
    add(
        "--more-workers",
        type=whole(2),
        nargs="*",
        default=[16, 24],
        help="numbers of workers of the part 'workers'; the first is also used in 'longer'",
    )
    add("--lr", type=positive, default=0.0125, help="learning rate for one worker's batch")
    add("--target", type=share, default=0.7, help="target accuracy, from 0 to 1")
    add("--eval-every", type=positive, default=0.5, help="epochs between evaluations")
    add("--jobs", type=whole(), default=2, help="number of runs at the same time")
    add(
        "--kept-only",
        action="store_true",
        help="show the finished runs in --out without running anything",
    )
    return parser


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return the command line's arguments, completed by the data set of the runs."""
    args = quick.parse(_parser(), argv, QUICK)
    args.stands = STANDS
    if args.quick:
        args.data = ["--dataset", "digits"]
        args.stands = {name: _quick(stand) for name, stand in STANDS.items()}
        return args
    if args.data_dir is None:
        raise UserError("--data-dir: expected a folder with CIFAR-10, got none; or give --quick")
    for name in () if args.kept_only else ("train", "test"):
        if not any((args.data_dir / name).glob("*/*")):
            raise UserError(
                f"--data-dir: expected images as {name}/CLASS/* in {str(args.data_dir)!r}, got "
                "none; examples/cifar10_folders.py writes CIFAR-10 like that"
            )
    args.data = ["--dataset", "imagefolder", "--data-dir", str(args.data_dir)]
    args.data += ["--precision", "bf16", "--channels-last", "--bn-batches", "40"]
    return args


def _quick(stand: Stand) -> Stand:
    return Stand("digits", 0.104, stand.original, stand.original_mb, stand.seconds, stand.published)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = _arguments(argv)
    facts = machine()
    table: list[dict[str, Any]] = []
    panels: dict[str, dict[str, Runs]] = {}
    with tempfile.TemporaryDirectory(prefix="convergence-") as temporary:
        out = args.out or Path(temporary)
        chosen = parts(args)
        if args.kept_only:
            chosen = _kept(chosen, out)
        for part in chosen:
            comparison = run(part, args, out)
            folder = out / slug(part.name)
            runs = {label: evaluations(folder, label, part.seeds) for label in part.labels}
            table += rows(part, folder, comparison, runs, args.epochs, args.target)
            panels[title(part, args.epochs)] = runs
    if not table:
        raise UserError(f"--out: expected finished runs in {out}, got none; run some")
    notes = NOTES.format(jitter=JITTER)
    found = harness.Findings(TITLE, table, notes, missed(table))
    status = harness.publish("convergence", argv, args, facts, found)
    if args.save is not None:
        draw(panels, args.target, args.save / "convergence.png")
        draw_race(table, args.save / "race.png")
    return status


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
