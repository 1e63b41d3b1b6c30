"""Errors that the user can mend."""

from __future__ import annotations

import os

SUSPENDED_STATUS = os.EX_TEMPFAIL
"""75: "temporary failure; the user is invited to retry" (sysexits.h)."""


class UserError(Exception):
    """What was asked for cannot be done as asked.

    The message names the argument, what was expected, what came and the remedy.
    The commands print it once, without a traceback, and exit with status 2.
    ``agreed``: every rank knows that the run ends here, and ends by itself.
    """

    def __init__(self, message: str, agreed: bool = False) -> None:
        super().__init__(message)
        self.agreed = agreed


class LostError(Exception):
    """The job cannot go on, because a rank has failed. The message says which and why."""


class ExcludedError(Exception):
    """This rank has to leave the run, which goes on without it. The message says why."""


class RefusedError(Exception):
    """The run is refused, and another rank says why."""


class ClosedError(UserError):
    """Another rank has closed the run: see :meth:`aladdin_mpi.DataParallel.close`.

    Attributes:
        rank: that rank.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(
            f"training loop: rank {rank} closed the run, by run.close() or because of an error "
            "inside `with DataParallel(...)`. To train again after such an error, catch this one "
            "too, and make another DataParallel on every rank."
        )
        self.rank = rank


class SuspendedError(SystemExit):
    """A signal has ended the run, which is saved and can be resumed.

    Raised on every rank. As every ``SystemExit`` it ends the program, without a traceback,
    with its status: :data:`SUSPENDED_STATUS`.
    """

    def __init__(self) -> None:
        super().__init__(SUSPENDED_STATUS)


def system_error(error: BaseException | None) -> OSError | None:
    """The OSError that an error is, or that led to it: torch tells one as a RuntimeError."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
