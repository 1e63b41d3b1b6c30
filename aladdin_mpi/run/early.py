"""What is refused before torch is loaded: by the options alone, and the number of ranks.

Importing this starts MPI, which has to come before torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from aladdin_mpi.transport.mpi import world  # first: it starts MPI

# isort: split
from aladdin_mpi.errors import RefusedError, UserError, combined
from aladdin_mpi.options.algorithms import find_algorithm
from aladdin_mpi.options.checks import check_ranks, checked_algorithm
from aladdin_mpi.options.resume import SUMMARY
from aladdin_mpi.options.run import AUTO, RunOptions, check_workers
from aladdin_mpi.options.settings import Settings
from aladdin_mpi.process import startup

T = TypeVar("T")
Options = TypeVar("Options", bound=RunOptions)


def agree_early(attempt: Callable[[], T]) -> T:
    """As :func:`.exchange.agree`, where there is no transport yet.

    Raises:
        UserError: at rank 0, what was wrong, and on which ranks if not on all.
        RefusedError: at the other ranks.
        PeerFailedError: a rank has died.
    """
    rank, size = world.place()
    startup.expect(startup.LIBRARIES_LOAD)  # the attempt may ask torch
    result: T | None = None
    problem = None
    try:
        result = attempt()
    except UserError as error:
        problem = str(error)
    startup.expect(startup.RANKS_MEET, least=startup.MEETING_LEAST)
    summary = combined(world.everyones(problem), size)
    startup.expect(startup.LIBRARIES_LOAD)
    if summary:
        raise UserError(summary, agreed=True) if rank == 0 else RefusedError
    return result  # type: ignore[return-value]


def check_ranks_of(settings: Settings) -> None:
    """Check that the ranks of this job suit the algorithm asked for.

    Before options are made of the settings, which may ask torch for an optimizer's defaults.

    Raises:
        UserError: they are too few, or too many of them are servers.
    """
    fields = RunOptions.model_fields
    resume, name, servers, spares = (
        settings[(field,)].value if (field,) in settings else fields[field].default
        for field in ("resume", "algorithm", "servers", "spares")
    )
    # Otherwise it is looked at later.
    if resume is None and str(servers).isdecimal() and str(spares).isdecimal():
        size = world.place()[1] - int(spares)
        check_ranks(find_algorithm(str(name)), size, int(servers))


def checked(options: Options) -> Options:
    """The options, if the ranks of this job can train by them.

    Raises:
        UserError: their number does not suit the options, or these do not go together.
    """
    size = world.place()[1] - options.spares
    if options.resume == AUTO and options.run_dir and (options.run_dir / SUMMARY).exists():
        return options  # nothing may be left to do, which any number of ranks can
    algorithm = checked_algorithm(options, size)
    check_workers(options, size - (options.servers if algorithm.has_servers else 0))
    return options
