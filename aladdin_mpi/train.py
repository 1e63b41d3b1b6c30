"""``mpirun -np N python -m aladdin_mpi.train``: train over MPI."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import inf
from pathlib import Path

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.reader import CommandLine, divided
from aladdin_mpi.options.run import RunRequest, TrainOptions, read_request, warnings
from aladdin_mpi.options.settings import Settings
from aladdin_mpi.process import console, guard, startup

REFUSED_SECONDS = 60.0
"""Longest wait for the other ranks if this one only has an error to report."""
PROG = "aladdin_mpi.train"
DESCRIPTION = (
    "Train a model with data parallelism over MPI. To run your script, which trains through "
    "DataParallel, use python -m aladdin_mpi.train SCRIPT.py [options] [-- arguments of the "
    "script]. Options on the command line override those in the script."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    line = divided(argv)
    startup.begin(startup.typed_limit(line.options))
    script = line.script
    if script is None:
        return guard.run_guarded(lambda: _train(line))
    typed = guard.run_guarded(lambda: _prepare(script, line))

    from aladdin_mpi.run.script import run_script

    run_script(script, line.arguments, typed)  # unguarded: it ends as if started by itself
    return 0


def _train(line: CommandLine) -> int:
    request_or_error = _begin(line)

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


def _prepare(script: Path, line: CommandLine) -> Settings:
    """Return the options that override those of a script, once all ranks have read them."""
    request_or_error = _begin(line)

    from aladdin_mpi.run.early import agree_early

    # isort: split
    from aladdin_mpi.run.script import check_script

    def checked(request: RunRequest[TrainOptions]) -> Settings:
        check_script(script)
        return request.given

    given = agree_early(request_or_error, checked)
    startup.expect(startup.SCRIPT_BEGINS, inf)
    return given


def _begin(line: CommandLine) -> RunRequest[TrainOptions] | UserError:
    """Return the request, or the error in it if other ranks have to learn of it.

    This comes before MPI starts, so that --help works without MPI.

    Raises:
        UserError: the options are invalid, and there is only one rank.
    """
    guard.note_suspend_signals()  # before the slow imports
    rank, size = guard.launched_place()
    follows = line.script is None
    try:
        with guard.quiet_unless_first(rank):
            request = read_request(TrainOptions, line.options, PROG, DESCRIPTION, follows)
    except UserError as error:
        if size == 1:
            raise
        startup.expect(startup.MPI_STARTS, REFUSED_SECONDS)
        return error
    if rank == 0 and not request.setting("quiet"):
        console.say(f"aladdin_mpi: starting {size} rank{'s' * (size > 1)}")
    startup.expect(startup.MPI_STARTS, _limit(request))
    return request


def _limit(request: RunRequest[TrainOptions]) -> float:
    """Return the longest wait for another rank, in seconds, before the options are checked."""
    with suppress(TypeError, ValueError):  # an option that will be refused
        return float(request.setting("timeout"))
    return REFUSED_SECONDS


if __name__ == "__main__":
    raise SystemExit(main())
