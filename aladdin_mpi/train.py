"""``mpirun -np N python -m aladdin_mpi.train``: train over MPI."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.run import TrainOptions
from aladdin_mpi.options.settings import Settings
from aladdin_mpi.process import guard, startup
from aladdin_mpi.run.greeting import Greeting

REFUSED_SECONDS = 60.0
"""Longest wait for the other ranks when this one has nothing but an error to tell."""
DESCRIPTION = "Train a model with data parallelism over MPI."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    startup.begin(startup.typed_limit(sys.argv[1:] if argv is None else argv))
    return guard.run_guarded(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    guard.note_suspend_signals()  # before the slow imports
    given, settings, problem = _read(argv)
    startup.expect(startup.MPI_STARTS, _limit(settings, problem))

    from aladdin_mpi.run.early import (
        agree_early,
        check_ranks_of,
        checked,
    )  # starts MPI, which comes before torch

    # isort: split
    from aladdin_mpi.options.run import TrainOptions
    from aladdin_mpi.options.settings import build

    def attempt() -> TrainOptions:
        if problem is not None:
            raise problem
        check_ranks_of(settings)
        return checked(build(TrainOptions, settings))

    options = agree_early(attempt)

    from aladdin_mpi.transport.mpi.engine import MpiTransport

    # isort: split
    from aladdin_mpi.options.run import warnings
    from aladdin_mpi.run.resumption import agree_on_resume
    from aladdin_mpi.run.trainer import train

    transport = MpiTransport(timeout=options.timeout)
    agreed = agree_on_resume(transport, TrainOptions, given, options)
    if agreed is not None:
        guard.warn(warnings(agreed, given) if transport.rank == 0 else [])
        train(agreed, transport)
    transport.close()
    return 0


def _read(argv: Sequence[str] | None) -> tuple[Settings, Settings, UserError | None]:
    """What was typed, that over a resumed run's settings, and what is wrong with it.

    Before MPI starts, so that --help works where MPI does not.

    Raises:
        UserError: something is, and there is no other rank to agree with.
    """
    rank, size = guard.launched_place()
    if rank == 0:
        text = f"starting {size} rank{'s' * (size > 1)}"
        greeting = Greeting(text, sys.argv[1:] if argv is None else argv)

    from aladdin_mpi.options.command_line import read
    from aladdin_mpi.options.run import TrainOptions, completed

    try:
        with guard.quiet_unless_first(rank):
            given = read(TrainOptions, argv, "aladdin_mpi.train", DESCRIPTION)
            settings = completed(TrainOptions, given)
            if rank == 0:
                greeting.settings_read(settings)
    except UserError as error:
        if size == 1:
            raise
        return {}, {}, error
    return given, settings, None


def _limit(settings: Settings, problem: UserError | None) -> float:
    """Longest wait for another rank in seconds, as far as it is known before MPI starts."""
    from aladdin_mpi.options.run import TrainOptions

    given = settings.get(("timeout",))
    try:
        value = TrainOptions.model_fields["timeout"].default if given is None else given.value
        return REFUSED_SECONDS if problem else float(value)
    except (TypeError, ValueError):
        return REFUSED_SECONDS  # it will be refused


if __name__ == "__main__":
    raise SystemExit(main())
