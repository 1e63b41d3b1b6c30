"""What a sample teaches with an algorithm, as a share of what it teaches synchronous SGD.

Samples per second times that share is what counts for the time to an accuracy. The shares are those
of measured runs (``learned.toml``), by number of workers, or of a pilot on the user's own task.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf, log
from pathlib import Path
from statistics import fmean

from aladdin_mpi.process import plain_json

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LATE = 0.7
"""Share of the base's samples after which its loss is the goal: then rates still are large."""
BASE = "ar-sgd"
EXACT = ("ar-sgd", "bsp")
"""Those that are synchronous SGD, whatever the number of workers."""
LIKE = {"osgp": "sgp", "shat": "asp", "eamsgd": "easgd"}
"""Algorithms that have not been measured with every number of workers, and the nearest one."""
SPREAD = 0.1
"""Share by which runs with another seed differ, about."""

Curve = list[tuple[float, float]]
"""Samples, and the training loss after so many."""


@dataclass(frozen=True)
class Share:
    """What a sample teaches.

    Attributes:
        value: 1 is as with synchronous SGD.
        source: where it is from, in a few words; empty: by definition.
        is_sure: measured about there.
    """

    value: float
    source: str = ""
    is_sure: bool = True


@cache
def table() -> Mapping[str, Mapping[int, float]]:
    """The measured shares, by algorithm and number of workers."""
    text = (Path(__file__).parent / "learned.toml").read_text(encoding="utf-8")
    return {
        name: {int(workers): of["share"] for workers, of in rows.items()}
        for name, rows in tomllib.loads(text).items()
    }


def measured(algorithm: str, workers: int) -> Share:
    """By the table, between two numbers of workers in proportion to their logarithms."""
    if algorithm in EXACT:
        return Share(1.0)
    rows = table().get(algorithm) or table().get(LIKE.get(algorithm, ""))
    if not rows:
        return Share(0.5, "not measured", is_sure=False)
    known = sorted(rows)
    if workers <= known[0] or workers >= known[-1]:
        nearest = known[0] if workers <= known[0] else known[-1]
        is_near = nearest / 2 <= workers <= 2 * nearest
        return Share(rows[nearest], f"measured with {nearest} workers", is_sure=is_near)
    above = next(number for number in known if number >= workers)
    below = max(number for number in known if number <= workers)
    if above == below:
        return Share(rows[above], f"measured with {above} workers")
    part = (log(workers) - log(below)) / (log(above) - log(below))
    value = rows[below] + part * (rows[above] - rows[below])
    return Share(value, f"measured with {below} and {above} workers")


# -- from runs ---------------------------------------------------------------------------
def curve(run: Path) -> Curve:
    """The training loss of a run, of three lines together since one is noisy."""
    lines = (plain_json.read(line) for line in (run / "metrics.jsonl").read_text().splitlines())
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
    """What a sample teaches, as a share of the base's: above 1 where it teaches more.

    By the samples to the loss that the base has after ``LATE`` of its own; or to the loss at one's
    end, if that is larger. Nothing where no loss was a number, as it had diverged at once.
    """
    if not mine:
        return 0.0
    goal = next(loss for samples, loss in base if samples >= LATE * base[-1][0])
    goal = max(goal, mine[-1][1])
    return samples_to(goal, base) / samples_to(goal, mine)
