"""Exceptions of the package."""

from __future__ import annotations

import errno
import os

DISK_FULL = errno.ENOSPC, errno.EDQUOT
"""Error codes of a full disk, and of an exhausted quota."""
SUSPENDED_STATUS = os.EX_TEMPFAIL
"""75: "temporary failure; the user is invited to retry" (sysexits.h)."""


class UserError(Exception):
    """Invalid input by the user: options, arguments, data or environment.

    The message names the argument, the expected and the actual value, and the remedy.
    The commands print it once, without a traceback, and exit with status 2.
    ``agreed``: every rank knows that the run ends, and ends by itself.
    """

    def __init__(self, message: str, agreed: bool = False) -> None:
        super().__init__(message)
        self.agreed = agreed


class LostError(Exception):
    """The job cannot continue because a rank has failed. The message names the rank."""


class ExcludedError(Exception):
    """This rank was excluded from the run, which continues. The message gives the reason."""


class CutOffError(ExcludedError):
    """This rank leaves a run that may continue, because it assumes that its own link is cut."""


class RefusedError(Exception):
    """The run is refused, and another rank reports the reason."""


class ClosedError(UserError):
    """Another rank has closed the run by :meth:`aladdin_mpi.DataParallel.close`.

    Attributes:
        rank: the rank that closed the run.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(
            f"training loop: rank {rank} closed the run, by run.close() or because of an error "
            "inside `with DataParallel(...)`. To train again after such an error, catch this one "
            "too, and make another DataParallel on every rank."
        )
        self.rank = rank


class LaunchError(RuntimeError):
    """A rank of :func:`aladdin_mpi.launch` has failed. The message contains its traceback."""


class SuspendedError(SystemExit):
    """A signal has ended the run, which is saved and can be resumed.

    Raised on every rank. Like every ``SystemExit``, it ends the program without a traceback. The
    exit status is :data:`SUSPENDED_STATUS`.
    """

    def __init__(self) -> None:
        super().__init__(SUSPENDED_STATUS)


class ServedError(StopIteration):
    """The run that this server served is over, and its loop over the data has no more batches.

    A ``for`` loop ends, and the script continues. If ``next()`` raises it, the process ends with
    status 0, as the script expects a batch.
    """


class TransportError(RuntimeError):
    """Communication failed, and the program cannot recover."""


class PeerFailedError(TransportError):
    """The peer of an operation has failed.

    ``rank`` is the failed rank; the message names its host.
    """

    def __init__(self, rank: int, host: str) -> None:
        super().__init__(f"rank {rank} (host {host}) has failed")
        self.rank = rank


class WaitTimeoutError(TransportError):
    """A wait lasted longer than the transport's ``timeout``."""


def system_error(error: BaseException | None) -> OSError | None:
    """Return the OSError behind an error, if any: torch reports some as a RuntimeError."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def combined(problems: list[str | None], size: int) -> str:
    """Return one message for the problems of all ranks, by rank; empty if no rank has one."""
    places: dict[str, list[int]] = {}
    for rank, problem in enumerate(problems):
        if problem is not None:
            places.setdefault(problem, []).append(rank)
    lines = []
    for problem, ranks in places.items():
        plain = len(ranks) == size or ranks == [0]
        named = "" if plain else f"rank {', '.join(map(str, ranks))}: "
        lines.append(named + problem)
    return "\n".join(lines)
