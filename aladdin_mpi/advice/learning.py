"""Sample efficiency of the algorithms, relative to synchronous SGD.

Throughput times sample efficiency, the effective throughput, determines the time to an accuracy.
The figures come from measured runs (``learned.toml`` and ``slow_links.toml``) or from a pilot run
of the user's task.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from math import inf, log
from pathlib import Path
from statistics import fmean
from typing import Any

from aladdin_mpi.advice.candidates import (
    ADAPTIVE,
    BYTES,
    CHOOSES_WIRE,
    GOSSIP,
    Candidate,
    ClusterTraits,
    link_steps,
    plain,
)
from aladdin_mpi.advice.options import AdviceRequest
from aladdin_mpi.advice.tables import read_table
from aladdin_mpi.advice.timed_run import Processes
from aladdin_mpi.errors import UserError
from aladdin_mpi.process import files

LINES = 40
"""Number of lines of metrics in a pilot run, which have the loss."""
LATE = 0.7
"""Share of the baseline's samples that defines the target loss: learning rates are still large."""
BASE = "ar-sgd"
EXACT = ("ar-sgd", "bsp")
"""Algorithms that are synchronous SGD for any number of workers."""
LIKE = {"osgp": "sgp", "shat": "asp", "eamsgd": "easgd"}
"""Algorithms without measurements, and a similar one that has them."""
MOST = 1.0
"""Cap on the sample efficiency from runs that did not converge: an algorithm that learns faster at
first is often no faster near convergence."""

SLOW_WORKERS = 8
"""Workers of the runs over slow links."""

Curve = list[tuple[float, float]]
"""Pairs of a number of samples and the training loss after them."""


@dataclass(frozen=True)
class SampleEfficiency:
    """A sample efficiency, relative to synchronous SGD.

    Attributes:
        source: short description of its origin; empty if it is exact by definition.
        is_sure: whether it was measured with a similar number of workers.
        interval: lowest and highest of several seeds; None if it is exact, or of one seed.
    """

    value: float
    source: str = ""
    is_sure: bool = True
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class EfficiencyRow:
    """The sample efficiency of an algorithm with one number of workers, from finished runs.

    Attributes:
        share: the mean over the ``seeds`` runs, from ``low`` to ``high``.
        steps: the length of the runs, in steps of every worker.
        converged: whether the runs ended near convergence; see :func:`credited`.
    """

    share: float
    low: float
    high: float
    seeds: int
    steps: int
    converged: bool

    @property
    def is_capped(self) -> bool:
        """Whether a seed of unconverged runs is at the cap, so that the figure is uncertain."""
        return self.high >= MOST and not self.converged


UNMEASURED = SampleEfficiency(0.5, "not measured", is_sure=False)
UNMEASURED_SLOW = SampleEfficiency(0.2, "not measured over slow links", is_sure=False)
"""For links that do not carry a gradient per step: less than was measured with rare exchanges."""

Rows = Mapping[int, EfficiencyRow]


def table() -> Mapping[str, Rows]:
    """Return the measured figures, by algorithm and number of workers."""
    return _read("learned.toml")


def slow_links() -> Mapping[str, Rows]:
    """Return the figures measured over slow links with :data:`SLOW_WORKERS` workers.

    They are by :func:`setting`, and by steps per round, or by the steps that a link takes for an
    fp32 gradient.
    """
    return _read("slow_links.toml")


@cache
def _read(name: str) -> Mapping[str, Rows]:
    return {
        name: {int(workers): EfficiencyRow(**of) for workers, of in rows.items()}
        for name, rows in read_table(name).items()
    }


def efficiency(candidate: Candidate, on: ClusterTraits) -> SampleEfficiency:
    """Return a candidate's sample efficiency on a cluster, from the tables."""
    workers = on.hosts if candidate.has_islands else on.workers
    known = measured(candidate.algorithm, workers)
    rows = slow_links().get(setting(candidate))
    is_unmeasured = known == UNMEASURED or candidate.algorithm in GOSSIP
    if is_unmeasured and not rows and link_steps(candidate, on) > 1:
        return UNMEASURED_SLOW
    number = _number(candidate, on)
    if not rows or (not number and candidate.algorithm in table()):
        return known
    slow = _interpolated(rows, number)
    adapts = known != UNMEASURED and candidate.algorithm in CHOOSES_WIRE
    if adapts and number < (least := min(rows)):
        part = log(number) / log(least)
        value = known.value + part * (slow.value - known.value)
        slow = replace(slow, value=value, interval=None, is_sure=False)
    if candidate.algorithm in table() and known.value < slow.value:
        return known
    source = f"measured with a GPT and {SLOW_WORKERS} workers over slow links"
    is_near = SLOW_WORKERS / 2 <= workers <= 2 * SLOW_WORKERS
    return replace(slow, source=source, is_sure=slow.is_sure and is_near)


def _number(candidate: Candidate, on: ClusterTraits) -> float:
    """Return a candidate's number in :func:`slow_links`; 0 if the links carry all it sends."""
    if candidate.algorithm not in ADAPTIVE:
        return float(candidate.rounds or 1)
    steps = link_steps(candidate, on)
    if candidate.algorithm in CHOOSES_WIRE:
        return steps if steps > 1 else 0.0
    steps *= BYTES[candidate.wire or "fp32"] / BYTES["fp32"]
    return steps if steps > 1 else 0.0


def setting(candidate: Candidate) -> str:
    """Return the key of a candidate in :func:`slow_links`."""
    is_quantised = candidate.algorithm in EXACT and candidate.wire.startswith("int")
    return f"{candidate.algorithm} {candidate.wire}" if is_quantised else candidate.algorithm


def measured(algorithm: str, workers: int) -> SampleEfficiency:
    """Return a figure from the table, interpolated by the logarithm of the number of workers."""
    if algorithm in EXACT:
        return SampleEfficiency(1.0)
    rows = table().get(algorithm) or table().get(LIKE.get(algorithm, ""))
    if not rows:
        return UNMEASURED
    return _interpolated(rows, workers)


def _interpolated(rows: Rows, wanted: float) -> SampleEfficiency:
    """Return a figure between two rows, by the logarithm of their numbers."""
    within = min(max(wanted, min(rows)), max(rows))
    below = max(number for number in rows if number <= within)
    above = min(number for number in rows if number >= within)  # may be the same one
    one, other = rows[below], rows[above]
    part = 0.0 if above == below else log(within / below) / log(above / below)
    is_near = within / 2 <= wanted <= 2 * within
    holds = is_near and one.converged and other.converged

    def between(first: float, second: float) -> float:
        value = first + part * (second - first)
        return value if holds else min(MOST, value)

    interval = None
    if min(one.seeds, other.seeds) > 1:
        interval = between(one.low, other.low), between(one.high, other.high)
    return SampleEfficiency(
        between(one.share, other.share),
        _source({below: one, above: other}),
        is_near and not (one.is_capped or other.is_capped),
        interval,
    )


def _source(rows: Rows) -> str:
    """Return a short description of the runs behind a figure."""
    each = [
        f"{workers} workers ({row.seeds} seed{'s' * (row.seeds > 1)}, {row.steps:,} steps"
        f"{', near convergence' if row.converged else ''})"
        for workers, row in rows.items()
    ]
    capped = f"; capped at {MOST:.2f}" if any(row.is_capped for row in rows.values()) else ""
    return f"measured with {' and '.join(each)}{capped}"


# -- from runs ---------------------------------------------------------------------------
def curve(run: Path) -> Curve:
    """Return the training loss of a run, averaged over three lines to reduce noise."""
    lines = (files.read(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    points = [(line["samples"], line["loss"]) for line in lines if line["kind"] == "train"]
    known = [(float(samples), float(loss)) for samples, loss in points if loss is not None]
    return [
        (samples, fmean(loss for _, loss in known[max(0, i - 2) : i + 1]))
        for i, (samples, _) in enumerate(known)
    ]


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Return the mean curve of several seeds, made monotonic by its running minimum."""
    least, mean = inf, []
    for points in zip(*curves, strict=False):
        least = min(least, fmean(loss for _, loss in points))
        mean.append((fmean(samples for samples, _ in points), least))
    return mean


def samples_to(loss: float, of: Curve) -> float:
    """Return the number of samples after which a curve reaches a loss."""
    before = of[0]
    for samples, reached in of:
        if reached <= loss:
            fall = before[1] - reached
            share = (before[1] - loss) / fall if fall > 0 else 0.0
            return before[0] + share * (samples - before[0])
        before = samples, reached
    raise ValueError(f"{loss} is not reached")


def credited(shares: Sequence[float], converged: bool) -> Sequence[float]:
    """Return the sample efficiencies of several seeds, capped at :data:`MOST` unless confirmed.

    A lead is confirmed if the runs ended near convergence and every one of several seeds has it.
    """
    if converged and len(shares) > 1 and min(shares) > MOST:
        return shares
    return [min(MOST, share) for share in shares]


def taught(mine: Curve, base: Curve) -> float:
    """Return the sample efficiency of a curve relative to the baseline's.

    It compares the samples to the loss that the baseline has after ``LATE`` of its samples, or to
    the final loss of ``mine`` if that is larger. A run that diverged at once has 0.
    """
    if not mine:
        return 0.0
    goal = next(loss for samples, loss in base if samples >= LATE * base[-1][0])
    goal = max(goal, mine[-1][1])
    return samples_to(goal, base) / samples_to(goal, mine)


# -- from a pilot --------------------------------------------------------------------------
def pilot(
    request: AdviceRequest,
    on: ClusterTraits,
    names: Sequence[str],
    report_progress: Callable[[str, int, int], None],
) -> dict[str, SampleEfficiency]:
    """Return the sample efficiencies of algorithms, by simulated training with real gradients.

    They are those of the plain candidates. ``report_progress`` is called with a description, and
    the numbers of completed and of all runs.

    Raises:
        UserError: the loss of synchronous SGD does not fall, so that there is no baseline.
    """
    steps = int(request.options.pilot or 0)
    curves: dict[str, Curve] = {}
    with closing(Processes(request.jobs)) as pool:
        tried = list(dict.fromkeys([BASE, *(name for name in names if name not in EXACT)]))
        futures = {pool.submit(real_run, _pilot_options(request, on, name)): name for name in tried}
        for completed, future in enumerate(as_completed(futures), start=1):
            curves[futures[future]] = future.result()
            report_progress(f"pilot: {futures[future]}", completed, len(tried))
    base = mean_curve([curves.pop(BASE)])
    if len(base) < LINES // 4 or base[-1][1] >= base[0][1]:
        raise UserError(
            f"--pilot {steps}: the loss of {BASE} did not fall in so few steps. Use more steps, "
            "or another --lr."
        )
    efficiencies = {name: SampleEfficiency(1.0) for name in EXACT}
    for name, points in curves.items():
        (share,) = credited([taught(mean_curve([points]), base)], converged=False)
        capped = f", capped at {MOST:.2f}" if share == MOST else ""
        source = f"pilot of {steps} steps, 1 seed{capped}"
        efficiencies[name] = SampleEfficiency(share, source, is_sure=steps >= 5 * LINES)
    return efficiencies


def in_rounds_of(
    piloted: SampleEfficiency, candidate: Candidate, on: ClusterTraits
) -> SampleEfficiency:
    """Return the sample efficiency of a pilot for a candidate, whose rounds may be longer."""
    first = plain(candidate.algorithm, on)
    if candidate.rounds == first.rounds:
        return piloted
    ratio = efficiency(candidate, on).value / efficiency(first, on).value
    source = f"{piloted.source} with {first.rounds} steps per round"
    return SampleEfficiency(piloted.value * ratio, source, is_sure=False)


def _pilot_options(request: AdviceRequest, on: ClusterTraits, name: str) -> dict[str, Any]:
    options = request.options
    whole, steps = options.batch_size * on.workers, int(options.pilot or 0)
    fields = {
        "compute": "real",
        "model": options.model,
        "dataset": options.dataset,
        "data_dir": options.data_dir,
        "batch_size": options.batch_size,
        "samples": whole * steps,
        "log_every": whole * max(1, steps // LINES),
        "eval_every": 0,
        "seed": options.seed,
        "quiet": True,
        **({} if options.lr is None else {"lr": options.lr}),
        **plain(name, on).fields,
    }
    return request.simulated(fields).model_dump(mode="json")


def real_run(options: dict[str, Any]) -> Curve:
    """Return the training loss of a simulation with real gradients, run in this process."""
    from aladdin_mpi.options.run import SimulateOptions
    from aladdin_mpi.run.trainer import simulate

    with tempfile.TemporaryDirectory(prefix="aladdin-pilot-") as folder:
        run = Path(folder) / "run"
        simulate(SimulateOptions.model_validate({**options, "run_dir": run}))
        return curve(run)
