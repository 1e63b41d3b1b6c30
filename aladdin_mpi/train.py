"""``mpirun -np N python -m aladdin_mpi.train``: train over MPI."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.run import RunRequest, TrainOptions, read_request, warnings
from aladdin_mpi.process import console, guard, startup

REFUSED_SECONDS = 60.0
"""Longest wait for the other ranks when this one has nothing but an error to tell."""
DESCRIPTION = "Train a model with data parallelism over MPI."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    startup.begin(startup.typed_limit(sys.argv[1:] if argv is None else argv))
    return guard.run_guarded(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    guard.note_suspend_signals()  # before the slow imports
    asked = _read(argv)
    startup.expect(startup.MPI_STARTS, _limit(asked))

    from aladdin_mpi.run.early import agree_early, checked  # starts MPI, which comes before torch

    request = agree_early(asked, checked)

    from aladdin_mpi.transport.mpi.engine import MpiTransport

    # isort: split
    from aladdin_mpi.run.resumption import agree_on_resume
    from aladdin_mpi.run.trainer import train

    transport = MpiTransport(timeout=request.options.timeout)
    agreed = agree_on_resume(transport, request)
    if agreed is not None:
        guard.warn(warnings(agreed, request.given) if transport.rank == 0 else [])
        train(agreed, transport)
    transport.close()
    return 0


def _read(argv: Sequence[str] | None) -> RunRequest[TrainOptions] | UserError:
    """What is asked for, or what is wrong with it.

    Before MPI starts, so that --help works where MPI does not.

    Raises:
        UserError: something is, and there is no other rank to agree with.
    """
    rank, size = guard.launched_place()
    try:
        with guard.quiet_unless_first(rank):
            request = read_request(TrainOptions, argv, "aladdin_mpi.train", DESCRIPTION)
    except UserError as error:
        if size == 1:
            raise
        return error
    if rank == 0 and not request.setting("quiet"):
        console.say(f"aladdin_mpi: starting {size} rank{'s' * (size > 1)}")
    return request


def _limit(asked: RunRequest[TrainOptions] | UserError) -> float:
    """Longest wait for another rank in seconds, as far as it is known before MPI starts."""
    try:
        return REFUSED_SECONDS if isinstance(asked, UserError) else float(asked.setting("timeout"))
    except (TypeError, ValueError):
        return REFUSED_SECONDS  # it will be refused


if __name__ == "__main__":
    raise SystemExit(main())
