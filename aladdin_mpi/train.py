"""``mpirun -np N python -m aladdin_mpi.train``: train over MPI."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from aladdin_mpi.errors import UserError
from aladdin_mpi.process import guard, stop_signal
from aladdin_mpi.process.deferred import defer
from aladdin_mpi.run.greeting import Greeting

AGREEMENT_SECONDS = 60.0
"""Longest wait for the other ranks when this one has nothing but an error to tell."""
DESCRIPTION = "Train a model with data parallelism over MPI."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    return guard.run_guarded(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    stop_signal.install()  # before the slow imports

    rank, size = guard.launched_place()
    if rank == 0:
        text = f"starting {size} rank{'s' * (size > 1)}"
        greeting = Greeting(text, sys.argv[1:] if argv is None else argv)

    defer("torch")  # which the options' files import too
    from aladdin_mpi.config.cli import read
    from aladdin_mpi.config.options import TrainOptions, completed
    from aladdin_mpi.config.settings import build

    # Options are read before MPI starts, so that --help works where MPI does not.
    problem: UserError | None = None
    try:
        with guard.quiet_unless_first(rank):
            given = read(TrainOptions, argv, "aladdin_mpi.train", DESCRIPTION)
            settings = completed(TrainOptions, given)
            if rank == 0:
                greeting.settings_read(settings)
        # MPI before torch, which is asked for the defaults of optimizers other than SGD.
        import aladdin_mpi.transport.mpi.engine  # noqa: F401

        options = build(TrainOptions, settings)
    except UserError as error:
        if size == 1:
            raise
        problem = error

    from aladdin_mpi.transport.mpi.engine import MpiTransport

    # isort: split
    from aladdin_mpi.config.unused import warnings
    from aladdin_mpi.control.exchange import agree
    from aladdin_mpi.run.auto_resume import agree_on_resume
    from aladdin_mpi.run.trainer import train

    transport = MpiTransport(timeout=AGREEMENT_SECONDS if problem else options.timeout)
    agree(transport, lambda: _raise(problem))
    agreed = agree_on_resume(transport, TrainOptions, given, options)
    if agreed is not None:
        guard.warn(warnings(agreed, given) if rank == 0 else [])
        train(agreed, transport)
    transport.close()
    return 0


def _raise(problem: UserError | None) -> None:
    if problem is not None:
        raise problem


if __name__ == "__main__":
    raise SystemExit(main())
