"""Accuracy over time from the evaluations of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.learning.part import slug

Runs = Sequence[Sequence[dict[str, Any]]]
"""Metrics lines by seed."""


def lines(folder: Path, label: str, seeds: int, kind: str) -> Runs:
    """Return the lines of one kind in metrics.jsonl for each of the first seeds."""
    runs = []
    for seed in range(seeds):
        path = folder / "runs" / slug(label) / f"seed-{seed}" / "metrics.jsonl"
        with path.open() as file:
            runs.append([line for text in file if (line := json.loads(text))["kind"] == kind])
    return runs


def evaluations(folder: Path, label: str, seeds: int) -> Runs:
    """Return the evaluation lines for each seed."""
    return lines(folder, label, seeds, "eval")


def accuracy_at(run: Sequence[Mapping[str, Any]], moment: float) -> float | None:
    """Return the accuracy of the last evaluation before a time in seconds."""
    before = [line["test_accuracy"] for line in run if line["seconds"] <= moment]
    return 100 * before[-1] if before else None


def crossing(run: Sequence[Mapping[str, Any]], target: float) -> tuple[float, float, float] | None:
    """Return when an accuracy is reached, interpolated between evaluations; None: never.

    Args:
        run: the run's evaluations.
        target: the accuracy, from 0 to 1.

    Returns:
        The seconds of the evaluation before, of the crossing, and of the first evaluation at or
        above the target. If that is the very first evaluation, its time three times.
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
    """Return the mean of `crossing` over the seeds; None unless all of them reach the target."""
    found = [crossing(run, target) for run in runs]
    there = [each for each in found if each is not None]
    if not there or len(there) < len(found):
        return None
    low, moment, high = (mean(column) for column in zip(*there, strict=True))
    return low, moment, high


def half_time(runs: Sequence[Sequence[Mapping[str, Any]]]) -> float:
    """Return when half of the samples were used, as the mean over the seeds."""
    return mean(
        next(line["seconds"] for line in run if 2 * line["samples"] >= run[-1]["samples"])
        for run in runs
    )
