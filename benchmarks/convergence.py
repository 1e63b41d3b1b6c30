"""How well and how fast the algorithms learn, with the timing of the ALADDIN paper's cluster.

    python -m benchmarks.convergence --data-dir cifar10 --out convergence --save
    python -m benchmarks.convergence --quick

Real gradients in virtual time: a step takes as long as on the paper's cluster (8 workers on 4
hosts, CIKM 2021, section 5.1), and the links are narrower by as much as the models are smaller,
so that a gradient is as long on its way as there. A stopped benchmark goes on with the same
command: finished runs are kept in the folder `--out`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from aladdin_mpi.errors import UserError
from benchmarks import harness, quick
from benchmarks.bounds import folder, positive, share, whole
from benchmarks.convergence_parts import (
    JITTER,
    NAMES,
    NESTEROV,
    STANDS,
    Part,
    Stand,
    parts,
    slug,
)
from benchmarks.convergence_plot import Runs, draw
from benchmarks.convergence_samples import ratios
from benchmarks.machine import machine

LIMIT = 24 * 3600.0

TITLE = "Learning with the timing of the ALADDIN paper's cluster"
NOTES = """\
Published: table 2 of the paper, of 250 epochs on CIFAR-10 with ResNet-50 and VGG-16; here it is
so many epochs with smaller networks and so many seeds, and the time is that of the modelled
cluster. Accuracies in %; after a plus-minus sign half the distance of the lowest and the highest
seed. Accuracy in time: of the last evaluation before the moment at which ALADDIN has used half of
its samples. To target: seconds until the accuracy is {target:g} %, on a straight line between the
first evaluation at or above it and the one before; between: the seconds of these two. Faster: the
time of ar-sgd to the target over this one's. Samples to loss: those that it takes to the training
loss that ar-sgd (with Nesterov's momentum, where it is there) has after 50 and 70 % of its samples,
over those of ar-sgd; means over the seeds. Step times vary by {jitter:.0%} (log-normal). Servers
and workers are dealt to the hosts in turn; without servers neighbours share a host. The study's SGP
overlaps its messages with a step, which is `osgp` here."""

QUICK = {"epochs": 2.0, "workers": 4, "more_workers": [], "target": 0.5, "parts": ["vgg"]}

BAR_ACCURACY = 0.3
"""ALADDIN's accuracy below the synchronous one's, at most, in points."""
BAR_SAMPLES = 1.05
"""aladdin-ahead's samples to the synchronous training loss, over ar-sgd's, at most."""
LOSS_SHARES = (0.5, 0.7)
"""Of the synchronous run's samples, where its training loss is taken."""
BAR_FASTER = 2.5
"""ALADDIN to the target with VGG's timing, against ar-sgd, at least."""


def run(part: Part, args: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Make the comparison, or go on with it; returns its `comparison.json`."""
    folder = out / slug(part.name)
    done = subprocess.run(part.command(args, folder), timeout=LIMIT, stdout=sys.stderr)
    if done.returncode:
        raise UserError(f"{part.name}: the comparison failed with status {done.returncode}")
    found: dict[str, Any] = json.loads((folder / "comparison.json").read_text())
    return found


def _kept(parts: Sequence[Part], out: Path) -> list[Part]:
    """The parts of which ALADDIN's run is finished, with their finished runs alone."""
    found = []
    for part in parts:
        folder = out / slug(part.name) / "runs"
        done = {
            label: run
            for label, run in part.runs.items()
            if all(
                (folder / slug(label) / f"seed-{seed}" / "summary.json").exists()
                for seed in range(part.seeds)
            )
        }
        if {"aladdin", "aladdin-ahead"} & done.keys():
            found.append(replace(part, runs=done))
    return found


def title(part: Part, epochs: float) -> str:
    """What a part's panel is headed by."""
    return (
        f"{part.name}: {part.stand.model}, {part.workers} workers, {epochs * part.share:g} epochs"
    )


def evaluations(folder: Path, label: str) -> Runs:
    """For each seed the lines of evaluation."""
    runs = sorted((folder / "runs" / slug(label)).glob("seed-*/metrics.jsonl"))
    lines = [[json.loads(line) for line in path.open()] for path in runs]
    return [[line for line in run if line["kind"] == "eval"] for run in lines]


def accuracy_at(run: Sequence[Mapping[str, Any]], moment: float) -> float | None:
    """The accuracy of the last evaluation before a moment in seconds."""
    before = [line["test_accuracy"] for line in run if line["seconds"] <= moment]
    return 100 * before[-1] if before else None


def crossing(run: Sequence[Mapping[str, Any]], target: float) -> tuple[float, float, float] | None:
    """When an accuracy is reached, on straight lines between evaluations; None: never.

    Args:
        run: its evaluations.
        target: the accuracy, from 0 to 1.

    Returns:
        The seconds of the evaluation before, those of the crossing, and those of the first
        evaluation at or above the target; three times that of the first of all, if it is that.
    """
    before = None
    for line in run:
        if line["test_accuracy"] >= target:
            return _between(before or line, line, target)
        before = line
    return None


def _between(
    before: Mapping[str, Any], line: Mapping[str, Any], target: float
) -> tuple[float, float, float]:
    gained = line["test_accuracy"] - before["test_accuracy"]
    share = (target - before["test_accuracy"]) / gained if gained else 0.0
    moment = before["seconds"] + share * (line["seconds"] - before["seconds"])
    return before["seconds"], moment, line["seconds"]


def to_target(runs: Runs, target: float) -> tuple[float, float, float] | None:
    """The mean of `crossing` over the seeds; None unless all of them reach the target."""
    found = [crossing(run, target) for run in runs]
    there = [each for each in found if each is not None]
    if not there or len(there) < len(found):
        return None
    low, moment, high = (mean(column) for column in zip(*there, strict=True))
    return low, moment, high


def half_time(runs: Sequence[Sequence[Mapping[str, Any]]]) -> float:
    """When half of the samples were used, in the mean over the seeds."""
    return mean(
        next(line["seconds"] for line in run if 2 * line["samples"] >= run[-1]["samples"])
        for run in runs
    )


def rows(
    part: Part, folder: Path, comparison: Mapping[str, Any], epochs: float, target: float
) -> list[dict[str, Any]]:
    """The table of one comparison; ``target`` is an accuracy from 0 to 1."""
    found = {row["label"]: row["figures"] for row in comparison["rows"]}
    moment = half_time(evaluations(folder, part.ours))
    times = {label: to_target(evaluations(folder, label), target) for label in part.labels}
    synchronous = times.get(part.base) if part.base else None
    table = []
    for label in part.labels:
        line = found[slug(label)]
        runs = evaluations(folder, label)
        at_moment = [a for run in runs if (a := accuracy_at(run, moment)) is not None]
        published = part.stand.published.get(label)
        there = times[label]
        table.append(
            {
                "part": part.name,
                "model": part.stand.model,
                "algorithm": label,
                "workers": part.workers,
                "epochs": epochs * part.share,
                "seeds": part.seeds,
                "accuracy": _spread(line["test_accuracy"]),
                "published accuracy": published[0] if published and part.published else None,
                "accuracy in time": mean(at_moment) if at_moment else None,
                "whole run, s": _mean(line, "seconds"),
                "to target, s": there[1] if there else None,
                "between, s": f"{there[0]:.0f}, {there[2]:.0f}" if there else None,
                "faster": synchronous[1] / there[1] if synchronous and there else None,
                "published faster": _published_faster(part, label),
                "speed-up": _mean(line, "speed_up"),
                "samples to loss": (
                    ratios(folder, label, part.base, LOSS_SHARES) if part.base else None
                ),
            }
        )
    return table


def _published_faster(part: Part, label: str) -> float | None:
    hours = {name: figures[1] for name, figures in part.stand.published.items()}
    if not part.published or label not in hours:
        return None
    return hours["ar-sgd"] / hours[label]


def _mean(row: Mapping[str, Any] | None, name: str) -> float | None:
    found = (row or {}).get(name)
    value = found["mean"] if isinstance(found, Mapping) else found
    return None if value is None else float(value)


def _spread(figure: Mapping[str, Any]) -> str:
    text = f"{100 * figure['mean']:.2f}"
    if figure["n"] > 1:
        text += f" ± {50 * (figure['high'] - figure['low']):.2f}"
    return text


def missed(table: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is not as the paper says, in words."""
    found = []
    for part in dict.fromkeys(row["part"] for row in table):
        lines = {row["algorithm"]: row for row in table if row["part"] == part}
        if {"aladdin-ahead", NESTEROV} <= lines.keys():
            found += _missed_ahead(part, lines["aladdin-ahead"], lines[NESTEROV])
        if not {"aladdin", "ar-sgd"} <= lines.keys():
            continue
        accuracy = {name: _accuracy(lines[name]) for name in lines}
        behind = accuracy["ar-sgd"] - accuracy["aladdin"]
        if behind > BAR_ACCURACY:
            found.append(
                f"{part}: ALADDIN's accuracy is {behind:.2f} points below ar-sgd's, expected at "
                f"most {BAR_ACCURACY}"
            )
        faster = lines["aladdin"]["faster"]
        if part == "vgg" and (faster is None or faster < BAR_FASTER):
            shown = "never" if faster is None else f"{faster:.2f} times as fast as ar-sgd"
            found.append(f"{part}: ALADDIN is at the target {shown}, expected {BAR_FASTER}")
    return found


def _missed_ahead(part: str, ours: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    found = []
    behind = _accuracy(base) - _accuracy(ours)
    if behind > BAR_ACCURACY:
        found.append(
            f"{part}: aladdin-ahead's accuracy is {behind:.2f} points below that of ar-sgd "
            f"--nesterov, expected at most {BAR_ACCURACY}"
        )
    samples = ours["samples to loss"].split(", ")
    if any(each == "never" or float(each) > BAR_SAMPLES for each in samples):
        found.append(
            f"{part}: aladdin-ahead takes {' and '.join(samples)} times the samples of ar-sgd "
            f"--nesterov to its training loss, expected at most {BAR_SAMPLES}"
        )
    return found


def _accuracy(row: Mapping[str, Any]) -> float:
    return float(row["accuracy"].split()[0])


def _parser() -> argparse.ArgumentParser:
    parser = harness.make_parser("convergence", "How well and how fast the algorithms learn.")
    add = parser.add_argument
    add("--data-dir", type=Path, help="CIFAR-10 as folders of images: train/CLASS and test/CLASS")
    add("--out", type=folder, help="folder for the runs; the same command goes on there")
    add(
        "--parts",
        nargs="+",
        choices=NAMES,
        default=list(NAMES),
        help="what to run",
    )
    add(
        "--epochs",
        type=positive,
        default=8.0,
        help="of part resnet; longer has three times as many, the others half of them",
    )
    add(
        "--seeds",
        type=whole(),
        default=1,
        help="runs of each algorithm; parts spread and ahead have 3",
    )
    add("--workers", type=whole(2), default=8, help="of each run")
    add(
        "--more-workers",
        type=whole(2),
        nargs="*",
        default=[16, 24],
        help="of the part 'workers'; the first of them also of 'longer'",
    )
    add("--lr", type=positive, default=0.0125, help="for the batch of one worker")
    add("--target", type=share, default=0.7, help="the accuracy, from 0 to 1, that is waited for")
    add("--eval-every", type=positive, default=0.5, help="epochs between evaluations")
    add("--jobs", type=whole(), default=2, help="runs side by side")
    add("--kept-only", action="store_true", help="show the finished runs in --out, and run nothing")
    return parser


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line's, and what the runs learn from."""
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
    """The command line; returns the exit status."""
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
            table += rows(part, folder, comparison, args.epochs, args.target)
            panels[title(part, args.epochs)] = {
                label: evaluations(folder, label) for label in part.labels
            }
    if not table:
        raise UserError(f"--out: expected finished runs in {out}, got none; run some")
    notes = NOTES.format(target=100 * args.target, jitter=JITTER)
    found = harness.Findings(TITLE, table, notes, missed(table))
    status = harness.publish("convergence", argv, args, facts, found)
    if args.save is not None:
        draw(panels, args.target, args.save / "convergence.png")
    return status


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
