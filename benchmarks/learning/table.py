"""The table of `benchmarks.convergence`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.learning.evaluations import Runs, accuracy_at, half_time, lines, to_target
from benchmarks.learning.part import Part, slug
from benchmarks.learning.samples import ratios

LOSS_SHARES = (0.5, 0.7)
"""Shares of the synchronous run's samples at which its training loss is taken."""


def rows(
    part: Part,
    folder: Path,
    comparison: Mapping[str, Any],
    evaluations: Mapping[str, Runs],
    epochs: float,
    target: float,
) -> list[dict[str, Any]]:
    """Return the table of one comparison.

    Args:
        folder: folder of its runs.
        evaluations: evaluations by label.
        epochs: epochs of a part whose share is 1.
        target: target accuracy from 0 to 1, for parts that have none.
    """
    target = part.target or target
    found = {row["label"]: row["figures"] for row in comparison["rows"]}
    moment = half_time(evaluations[part.ours])
    times = {label: to_target(runs, target) for label, runs in evaluations.items()}
    base = lines(folder, part.base, part.seeds, "train") if part.base else None
    synchronous = times.get(part.base) if part.base else None
    table = []
    for label in part.labels:
        line = found[slug(label)]
        runs = evaluations[label]
        at_moment = [a for run in runs if (a := accuracy_at(run, moment)) is not None]
        published = part.published.get(label)
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
                "published accuracy": published[0] if published else None,
                "accuracy in time": mean(at_moment) if at_moment else None,
                "whole run, s": _mean(line, "seconds"),
                "target": 100 * target,
                "to target, s": there[1] if there else None,
                "between, s": f"{there[0]:.0f}, {there[2]:.0f}" if there else None,
                "faster": synchronous[1] / there[1] if synchronous and there else None,
                "published faster": _published_faster(part, label),
                "speed-up": _mean(line, "speed_up"),
                "samples to loss": (
                    ratios(lines(folder, label, part.seeds, "train"), base, LOSS_SHARES)
                    if base
                    else None
                ),
            }
        )
    return table


def _published_faster(part: Part, label: str) -> float | None:
    hours = {name: figures[1] for name, figures in part.published.items()}
    base, own = hours.get("ar-sgd"), hours.get(label)
    return base / own if base and own else None


def _mean(row: Mapping[str, Any] | None, name: str) -> float | None:
    found = (row or {}).get(name)
    value = found["mean"] if isinstance(found, Mapping) else found
    return None if value is None else float(value)


def _spread(figure: Mapping[str, Any]) -> str:
    text = f"{100 * figure['mean']:.2f}"
    if figure["n"] > 1:
        text += f" ± {50 * (figure['high'] - figure['low']):.2f}"
    return text
