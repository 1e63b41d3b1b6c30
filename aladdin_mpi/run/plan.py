"""A run in samples: its length, and how often something happens."""

from __future__ import annotations

from dataclasses import dataclass

from aladdin_mpi.options.run import RunOptions
from aladdin_mpi.run.origin import Origin, samples_of

CHECKPOINT_SECONDS = 600.0
"""Between checkpoints, if nobody says otherwise."""


@dataclass(frozen=True)
class Plan:
    """The run in samples: its length, an epoch, and how often something happens."""

    total: int
    epoch: int
    step: int
    """Of all workers that the run began with."""
    schedule_step: int
    """After which a scheduler goes on."""
    log_every: int
    eval_every: int
    """0: only at the end."""
    checkpoint_every: int
    """0: only at the end, or by time."""
    checkpoint_seconds: float
    """0: not by time."""


def make_plan(
    options: RunOptions, epoch: int, origin: Origin, over_mpi: bool, whole: int = 1
) -> Plan:
    """The plan of a run whose epoch has ``epoch`` samples; without MPI none goes by time.

    Checkpoints are written after multiples of ``whole`` samples.
    """
    total = samples_of(options, epoch, origin.first_workers)
    assert total is not None  # as the epoch's length is known
    step = options.step_size * origin.first_workers
    every = options.checkpoint_every
    by_samples = by_seconds = 0.0
    if every is None and over_mpi:
        by_seconds = CHECKPOINT_SECONDS
    if every is not None:
        by_samples = every.samples or (every.epochs or 0) * epoch
        by_seconds = every.seconds or 0.0
    return Plan(
        total=total,
        epoch=epoch,
        step=step,
        schedule_step=origin.schedule_step
        or (options.step_size if options.steps is None else step),
        log_every=options.log_every or epoch,
        eval_every=round(options.eval_every * epoch),
        checkpoint_every=-(-round(by_samples) // whole) * whole,
        checkpoint_seconds=by_seconds,
    )
