"""ASHL's plan: from every worker's times its local steps, its share and its rate.

Algorithms 1 and 2 of the paper. Times are in seconds; lists have an entry for each worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SHORTEST = 1e-9
"""Seconds: a shorter step cannot be measured."""


class Times(NamedTuple):
    """What a worker has measured: a local step, a push of all values, a pull, choosing values."""

    step: float
    push: float
    pull: float
    compress: float


class Stage(NamedTuple):
    """A worker's part in a stage: its share D_i, its local steps H_i, its rate R_i."""

    share: float
    steps: int
    rate: float


class Share(NamedTuple):
    """A worker's part of the plan."""

    coarse: Stage
    fine: Stage


def local_steps(times: Sequence[Times], preset: int, rate: float = 1.0) -> list[int]:
    """Algorithm 1: ``H_i``, so that all need as long as the slowest needs for ``preset`` steps.

    ``T_upd,i = T_iter,i H_preset + T_comm,i``, ``T_max = max T_upd,i``,
    ``H_i = round((T_max - T_comm,i) / T_iter,i)``, which is never below H_preset.

    Args:
        times: of every worker.
        preset: H_preset.
        rate: share of the values that is pushed, r_preset; below 1 they have to be chosen.
    """
    talk = [
        rate * worker.push + worker.pull + (worker.compress if rate < 1 else 0.0)
        for worker in times
    ]
    step = [max(worker.step, SHORTEST) for worker in times]
    longest = max(s * preset + t for s, t in zip(step, talk, strict=True))
    return [round((longest - t) / s) for s, t in zip(step, talk, strict=True)]


def shares(steps: Sequence[int]) -> list[float]:
    """``D_i = H_i / sum H``, the share of all data that a worker computes on."""
    total = sum(steps)
    return [own / total for own in steps]


def rates(times: Sequence[Times], steps: Sequence[int], preset: float) -> list[float]:
    """Algorithm 2: ``R_i``, so that who has time left pushes more than ``preset`` of the values.

    ``T_upd,i = T_iter,i H_i + T_compress,i + r_preset T_push,i + T_pull,i``,
    ``T_max = max T_upd,i``,
    ``R_i = min(1, (T_max - (T_iter,i H_i + T_compress,i + T_pull,i)) / T_push,i)``.

    With a preset of 1 nothing is chosen: all are 1. A push that takes no time is whole.
    """
    if preset == 1:
        return [1.0] * len(times)
    rest = [
        worker.step * own + worker.compress + worker.pull
        for worker, own in zip(times, steps, strict=True)
    ]
    longest = max(r + preset * worker.push for worker, r in zip(times, rest, strict=True))
    return [
        max(preset, min(1.0, (longest - r) / worker.push)) if worker.push > 0 else 1.0
        for worker, r in zip(times, rest, strict=True)
    ]


def _stage(times: Sequence[Times], preset: int, rate: float) -> list[Stage]:
    steps = local_steps(times, preset, rate)
    rows = zip(shares(steps), steps, rates(times, steps, rate), strict=True)
    return [Stage(*row) for row in rows]


def make_plan(
    times: Sequence[Times],
    coarse_steps: int,
    fine_steps: int,
    coarse_rate: float,
    fine_rate: float,
) -> list[Share]:
    """Everyone's part, from the presets of both stages."""
    coarse = _stage(times, coarse_steps, coarse_rate)
    fine = _stage(times, fine_steps, fine_rate)
    return [Share(*parts) for parts in zip(coarse, fine, strict=True)]
