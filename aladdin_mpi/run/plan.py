"""A run in samples: its length, its milestones, and the ranks that it began with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aladdin_mpi.control.exchange import all_or_none, broadcast
from aladdin_mpi.data.sampler import Period
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import Algorithm
from aladdin_mpi.options.reader import LARGEST_WHOLE
from aladdin_mpi.options.run import RunOptions
from aladdin_mpi.run.checkpoint import CheckpointStore
from aladdin_mpi.transport.base import Transport


@dataclass(frozen=True)
class Origin:
    """The ranks of a run's last checkpoint, and earlier changes of their number.

    Attributes:
        workers: of the checkpoint; of the run, where there is none.
        servers: likewise.
        past: periods with other numbers of workers.
        schedule_step: samples after which a scheduler goes on, where the run has begun; else None.
        begun: servers and workers that were asked for when they last changed by the user's will;
            some may have been lost since.
    """

    workers: int
    servers: int
    past: tuple[Period, ...] = ()
    schedule_step: int | None = None
    begun: tuple[int, int] | None = None

    @property
    def first_workers(self) -> int:
        """How many the run began with."""
        return self.past[0].workers if self.past else self.workers

    def as_json(self, schedule_step: int) -> dict[str, Any]:
        """For a checkpoint's manifest."""
        past = [period.taken for period in self.past]
        return {"past": past, "schedule_step": schedule_step, "begun": self.begun}

    def fits(self, servers: int, workers: int) -> bool:
        """Whether a run of so many goes on with a checkpoint without being asked to resize."""
        return (servers, workers) in ((self.servers, self.workers), self.begun)


def find_origin(transport: Transport, options: RunOptions, algorithm: Algorithm) -> Origin:
    """Where the run comes from; every rank calls it, and rank 0 looks.

    Raises:
        UserError, RefusedError: there is no checkpoint to go on from, or it cannot be read.
    """
    servers = options.servers if algorithm.has_servers else 0
    if options.resume is None:
        workers = transport.size - options.spares - servers
        return Origin(workers, servers, begun=(servers, workers))
    folder = Path(options.resume)
    manifest = all_or_none(
        transport, lambda: CheckpointStore(folder).manifest() if transport.rank == 0 else {}
    )
    names = ("ranks", "option", "past", "schedule_step", "begun")
    return _origin(
        broadcast(transport, {name: manifest.get(name) for name in names}),
        bool(algorithm.has_servers),
    )


def _origin(manifest: Mapping[str, Any], has_servers: bool) -> Origin:
    servers = int(manifest["option"]["servers"]) if has_servers else 0
    past: Sequence[Sequence[int | None]] = manifest["past"] or ()  # none before it was written
    periods = tuple(Period(tuple(taken)) for taken in past)
    begun: Sequence[int] = manifest["begun"] or (servers, manifest["ranks"] - servers)
    return Origin(
        manifest["ranks"] - servers,
        servers,
        periods,
        manifest["schedule_step"],
        (begun[0], begun[1]),
    )


def samples_of(options: RunOptions, epoch: int | None, workers: int) -> int | None:
    """The length of a run in samples; None: nobody knows, as its epochs have no length.

    A step keeps the size that it has where the run begins, also when the number of workers
    changes: the run then has as many samples as before.

    Args:
        options: of the run.
        epoch: samples of an epoch.
        workers: that the run begins with.
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
            f"--epochs: expected at most {LARGEST_WHOLE:g} samples in all, got {options.epochs:g} "
            f"times {epoch}; give fewer"
        )
    return max(1, round(length))


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
