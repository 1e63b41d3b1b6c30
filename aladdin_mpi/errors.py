"""Errors that the user can mend."""

from __future__ import annotations


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


class RefusedError(Exception):
    """The run is refused, and another rank says why."""
