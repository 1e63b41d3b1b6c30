"""``mpirun -np N python -m aladdin_mpi.train``: train over MPI."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.run import RunRequest, TrainOptions, read_request, warnings
from aladdin_mpi.process import console, guard, startup

REFUSED_SECONDS = 60.0
"""Longest wait for the other ranks if this one only has an error to report."""
DESCRIPTION = "Train a model with data parallelism over MPI."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    startup.begin(startup.typed_limit(sys.argv[1:] if argv is None else argv))
    return guard.run_guarded(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    guard.note_suspend_signals()  # before the slow imports
    request_or_error = _read(argv)
    startup.expect(startup.MPI_STARTS, _limit(request_or_error))

    from aladdin_mpi.run.early import agree_early, checked  # starts MPI, which comes before torch

    request = agree_early(request_or_error, checked)

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
    """Return the request, or the error in it if other ranks have to learn of it.

    This comes before MPI starts, so that --help works without MPI.

    Raises:
        UserError: the options are invalid, and there is only one rank.
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


def _limit(request: RunRequest[TrainOptions] | UserError) -> float:
    """Return the longest wait for another rank, in seconds, before the options are checked."""
    with suppress(TypeError, ValueError):  # an option that will be refused
        if not isinstance(request, UserError):
            return float(request.setting("timeout"))
    return REFUSED_SECONDS


if __name__ == "__main__":
    raise SystemExit(main())
