"""Bars for the runs of `benchmarks.convergence`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.learning.part import NESTEROV
from benchmarks.learning.parts import PUBLISHED_WORKERS, SLOWDOWNS, ahead_name, slow_name

BAR_ACCURACY = 0.3
"""Largest deficit in accuracy against synchronous training, in points."""
BAR_SAMPLES = 1.05
"""Largest ratio of aladdin-ahead's samples to ar-sgd's, to the synchronous training loss."""
BAR_FASTER = 2.5
"""Smallest speed of ALADDIN to the target relative to ar-sgd, with VGG's timing, as published."""
BAR_SLOW_ACCURACY = 0.5
"""Largest loss of accuracy of aladdin-ahead with a slow worker, in points."""
BAR_SLOW_FASTER = {10: 6.0}
"""Smallest speed of aladdin-ahead to the target relative to ar-sgd, by one worker's slowdown."""
BAR_VGG_FASTER, BAR_VGG_SPEED_UP = 1.2, 7.9
"""The same with VGG's timing and eight workers."""

Lines = Mapping[str, Mapping[str, Any]]
"""The rows of a part, by algorithm."""


def missed(table: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a description of each missed bar."""
    parts: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in table:
        parts.setdefault(row["part"], {})[row["algorithm"]] = row
    found = []
    for part, lines in parts.items():
        if part.startswith("ahead") and {"aladdin-ahead", NESTEROV} <= lines.keys():
            found += _missed_ahead(part, lines["aladdin-ahead"], lines[NESTEROV])
        if not part.startswith("race") and {"aladdin", "ar-sgd"} <= lines.keys():
            found += _missed_published(part, lines["aladdin"], lines["ar-sgd"])
    alike = parts.get(ahead_name(PUBLISHED_WORKERS), {}).get("aladdin-ahead")
    for factor in SLOWDOWNS:
        if ours := parts.get(slow_name(factor), {}).get("aladdin-ahead"):
            found += _missed_slow(ours, alike, BAR_SLOW_FASTER.get(factor))
    if ours := parts.get(ahead_name("vgg"), {}).get("aladdin-ahead"):
        found += _missed_vgg(ours, parts)
    return found


def _missed_accuracy(
    name: str, ours: Mapping[str, Any], than: str, base: Mapping[str, Any], bar: float
) -> list[str]:
    behind = _accuracy(base) - _accuracy(ours)
    if behind <= bar:
        return []
    return [
        f"{ours['part']}: {name}'s accuracy is {behind:.2f} points below {than}, expected at most "
        f"{bar}"
    ]


def _missed_published(part: str, ours: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    found = _missed_accuracy("ALADDIN", ours, "ar-sgd's", base, BAR_ACCURACY)
    if part == "vgg":
        found += _missed_faster("ALADDIN", ours, BAR_FASTER)
    return found


def _missed_faster(name: str, ours: Mapping[str, Any], bar: float) -> list[str]:
    faster = ours["faster"]
    if faster is not None and faster >= bar:
        return []
    shown = "never" if faster is None else f"{faster:.2f} times as fast as ar-sgd"
    return [f"{ours['part']}: {name} reaches the target {shown}, expected {bar}"]


def _missed_slow(
    ours: Mapping[str, Any], alike: Mapping[str, Any] | None, bar: float | None
) -> list[str]:
    found = []
    if alike:
        than = "that with equal workers"
        found += _missed_accuracy("aladdin-ahead", ours, than, alike, BAR_SLOW_ACCURACY)
    if bar is not None:
        found += _missed_faster("aladdin-ahead", ours, bar)
    return found


def _missed_vgg(ours: Mapping[str, Any], parts: Mapping[str, Lines]) -> list[str]:
    """Check that aladdin-ahead reaches the target first with VGG's timing."""
    part = ours["part"]
    found = _missed_faster("aladdin-ahead", ours, BAR_VGG_FASTER)
    if ours["speed-up"] < BAR_VGG_SPEED_UP:
        found.append(
            f"{part}: aladdin-ahead has a speedup of {ours['speed-up']:.2f}, expected "
            f"{BAR_VGG_SPEED_UP}"
        )
    times = {
        name: row["to target, s"]
        for name, row in parts.get("vgg", {}).items()
        if row["to target, s"] is not None
    }
    first = min(times, key=times.__getitem__, default=None)
    own = ours["to target, s"]
    if first is not None and (own is None or times[first] < own):
        found.append(f"{part}: {first} reaches the target before aladdin-ahead")
    return found


def _missed_ahead(part: str, ours: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    than = "that of ar-sgd --nesterov"
    found = _missed_accuracy("aladdin-ahead", ours, than, base, BAR_ACCURACY)
    samples = ours["samples to loss"].split(", ")
    if any(each == "never" or float(each) > BAR_SAMPLES for each in samples):
        found.append(
            f"{part}: aladdin-ahead takes {' and '.join(samples)} times the samples of ar-sgd "
            f"--nesterov to its training loss, expected at most {BAR_SAMPLES}"
        )
    return found


def _accuracy(row: Mapping[str, Any]) -> float:
    return float(row["accuracy"].split()[0])
