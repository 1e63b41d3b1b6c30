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
from aladdin_mpi.options.general import AUTO
from aladdin_mpi.options.run import SUMMARY, RunOptions, RunRequest, check_workers
from aladdin_mpi.process import startup

T = TypeVar("T")
R = TypeVar("R")
Options = TypeVar("Options", bound=RunOptions)


def agree_early(asked: T | UserError, check: Callable[[T], R]) -> R:
    """Check what this rank was asked, as :func:`.exchange.all_or_none`, without a transport.

    Args:
        asked: as it was read, or why it could not be.
        check: raises :class:`UserError` for what cannot be done.

    Raises:
        UserError: at rank 0, what was wrong, and on which ranks if not on all.
        RefusedError: at the other ranks.
        PeerFailedError: a rank has died.
    """
    rank, size = world.place()
    startup.expect(startup.LIBRARIES_LOAD)  # the check may ask torch
    result: R | None = None
    problem = None
    try:
        if isinstance(asked, UserError):
            raise asked
        result = check(asked)
    except UserError as error:
        problem = str(error)
    startup.expect(startup.RANKS_MEET, least=startup.MEETING_LEAST)
    summary = combined(world.everyones(problem), size)
    startup.expect(startup.LIBRARIES_LOAD)
    if summary:
        raise UserError(summary, agreed=True) if rank == 0 else RefusedError
    return result  # type: ignore[return-value]


def checked(request: RunRequest[Options]) -> RunRequest[Options]:
    """The same, if the ranks of this job can train by it.

    Raises:
        UserError: their number does not suit the options, or these do not go together.
    """
    ranks = world.place()[1]
    servers, spares = (str(request.setting(name)) for name in ("servers", "spares"))
    # Before the options are made, which may ask torch for an optimizer's defaults.
    if request.setting("resume") is None and servers.isdecimal() and spares.isdecimal():
        algorithm = find_algorithm(str(request.setting("algorithm")))
        check_ranks(algorithm, ranks - int(spares), int(servers))
    options = request.options
    if options.resume == AUTO and options.run_dir and (options.run_dir / SUMMARY).exists():
        return request  # nothing may be left to do, which any number of ranks can
    workers = ranks - options.spares
    algorithm = checked_algorithm(options, workers)
    check_workers(options, workers - (options.servers if algorithm.has_servers else 0))
    return request
