"""Checks before torch is loaded: of the options and the number of ranks.

Importing this module starts MPI, which has to happen before torch is loaded.
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


def agree_early(request: T | UserError, check: Callable[[T], R]) -> R:
    """Check a request on all ranks, as :func:`.exchange.all_or_none` but without a transport.

    Args:
        request: this rank's request, or the error in reading it.
        check: raises :class:`UserError` if the request is invalid.

    Raises:
        UserError: at rank 0, with the errors, and their ranks if they differ.
        RefusedError: at the other ranks.
        PeerFailedError: a rank has failed.
    """
    rank, size = world.place()
    startup.expect(startup.LIBRARIES_LOAD)  # the check may load torch
    result: R | None = None
    problem = None
    try:
        if isinstance(request, UserError):
            raise request
        result = check(request)
    except UserError as error:
        problem = str(error)
    startup.expect(startup.RANKS_MEET, least=startup.MEETING_LEAST)
    summary = combined(world.everyones(problem), size)
    startup.expect(startup.LIBRARIES_LOAD)
    if summary:
        raise UserError(summary, agreed=True) if rank == 0 else RefusedError
    return result  # type: ignore[return-value]


def checked(request: RunRequest[Options]) -> RunRequest[Options]:
    """Return ``request`` after checking it against the number of ranks in this job.

    Raises:
        UserError: the number of ranks does not suit the options, or options conflict.
    """
    ranks = world.place()[1]
    servers, spares = (str(request.setting(name)) for name in ("servers", "spares"))
    # Before the options are built, which may load torch for an optimizer's defaults.
    if request.setting("resume") is None and servers.isdecimal() and spares.isdecimal():
        algorithm = find_algorithm(str(request.setting("algorithm")))
        check_ranks(algorithm, ranks - int(spares), int(servers))
    options = request.options
    if options.resume == AUTO and options.run_dir and (options.run_dir / SUMMARY).exists():
        return request  # the run may be complete, which allows any number of ranks
    workers = ranks - options.spares
    algorithm = checked_algorithm(options, workers)
    check_workers(options, workers - (options.servers if algorithm.has_servers else 0))
    return request
