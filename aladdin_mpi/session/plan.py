"""A run in samples: its length, its milestones, and its initial ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aladdin_mpi.data.sampler import Period
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.run import RunOptions
from aladdin_mpi.options.settings import LARGEST_WHOLE
from aladdin_mpi.session.islands import Islands


@dataclass(frozen=True)
class Origin:
    """The ranks of a run's last checkpoint, and earlier changes of their number.

    Attributes:
        workers: workers of the checkpoint, or of the run if it has no checkpoint.
        servers: servers, likewise.
        past: periods with other numbers of workers.
        schedule_step: samples between steps of a scheduler, if the run has started; else None.
        begun: servers and workers last requested by the user; some may have failed since.
        islands: the ranks of each island, if several are one worker of the algorithm.
        lanes: number of lanes of these.
    """

    workers: int
    servers: int
    past: tuple[Period, ...] = ()
    schedule_step: int | None = None
    begun: tuple[int, int] | None = None
    islands: Sequence[Sequence[int]] = ()
    lanes: int = 1

    @property
    def ranks(self) -> Islands:
        """All ranks."""
        if not self.islands:
            return Islands.of_single_ranks(self.servers, self.servers + self.workers)
        return Islands(self.servers, self.islands, self.lanes)

    @property
    def first_workers(self) -> int:
        """The initial number of workers."""
        return self.past[0].workers if self.past else self.workers

    def as_json(self, schedule_step: int) -> dict[str, Any]:
        """Return the entries for a checkpoint's manifest."""
        past = [period.taken for period in self.past]
        return {"past": past, "schedule_step": schedule_step, "begun": self.begun}

    def fits(self, servers: int, workers: int) -> bool:
        """Return whether a run with these ranks can resume a checkpoint without resizing."""
        return (servers, workers) in ((self.servers, self.workers), self.begun)


def samples_of(options: RunOptions, epoch: int | None, workers: int) -> int | None:
    """Return the length of a run in samples; None if its epochs have no known length.

    A step keeps the size for the initial number of ``workers`` when that number changes: the
    run then has the same number of samples. An epoch has ``epoch``.
    """
    if options.samples is not None:
        return options.samples
    if options.steps is not None:
        return options.steps * options.step_size * workers
    if epoch is None:
        return None
    length = (options.epochs or 0) * epoch
    if length > LARGEST_WHOLE:
        raise UserError(
            f"--epochs: expected at most {LARGEST_WHOLE:g} samples in all, got "
            f"{options.epochs:g} times {epoch}; use fewer"
        )
    return max(1, round(length))


CHECKPOINT_SECONDS = 600.0
"""Default interval between checkpoints."""


@dataclass(frozen=True)
class Plan:
    """The run in samples: its length, an epoch, and the intervals of recurring actions."""

    total: int
    epoch: int
    step: int
    """Samples of a step of all initial workers."""
    schedule_step: int
    """Samples between steps of a scheduler."""
    log_every: int
    eval_every: int
    """0: only at the end."""
    checkpoint_every: int
    """0: only at the end, or by time."""
    checkpoint_seconds: float
    """0: not by time."""


def _samples(interval: float) -> int:
    """Return an interval in whole samples, at least one unless it is 0, which is never."""
    return max(1, round(interval)) if interval else 0


def make_plan(
    options: RunOptions, epoch: int, origin: Origin, over_mpi: bool, uncut: int = 0
) -> Plan:
    """Return the plan; without MPI no checkpoint is due by time.

    An epoch has ``epoch`` samples. If batches of ``uncut`` samples may not be cut, checkpoints are
    written after rounds of one batch per worker.
    """
    whole = uncut * origin.first_workers or 1
    total = samples_of(options, epoch, origin.first_workers)
    assert total is not None  # since the epoch's length is known
    step = options.step_size * origin.first_workers
    every, by_samples = options.checkpoint_every, 0.0
    by_seconds = CHECKPOINT_SECONDS if over_mpi else 0.0
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
        eval_every=_samples(options.eval_every * epoch),
        checkpoint_every=-(-_samples(by_samples) // whole) * whole,
        checkpoint_seconds=by_seconds,
    )
