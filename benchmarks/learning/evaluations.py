"""What the evaluations of a run say of its accuracy over time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.learning.part import slug

Runs = Sequence[Sequence[dict[str, Any]]]
"""For each seed its lines."""


def lines(folder: Path, label: str, seeds: int, kind: str) -> Runs:
    """For each of the first seeds the lines of metrics.jsonl of a kind."""
    runs = []
    for seed in range(seeds):
        path = folder / "runs" / slug(label) / f"seed-{seed}" / "metrics.jsonl"
        with path.open() as file:
            runs.append([line for text in file if (line := json.loads(text))["kind"] == kind])
    return runs


def evaluations(folder: Path, label: str, seeds: int) -> Runs:
    """For each seed the lines of evaluation."""
    return lines(folder, label, seeds, "eval")


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
