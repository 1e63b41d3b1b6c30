"""How far the user's loop has come, which a rank has to know that takes a place in mid-run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from aladdin_mpi.errors import LostError


@dataclass
class LoopProgress:
    """One worker's.

    Attributes:
        epoch: the present one of a loop by epochs.
        reductions: calls of ``run.reduce()``.
        first_epoch: with which a rank begins that has taken a place in mid-run; None: it has not.
    """

    epoch: int = 0
    reductions: int = 0
    first_epoch: int | None = None

    def as_plain(self) -> dict[str, int]:
        """For another rank."""
        return {"epoch": self.epoch, "reductions": self.reductions}

    def take_over(self, others: Collection[Mapping[str, Any]], is_new: bool) -> None:
        """Another group of ranks goes on.

        Args:
            others: what its workers tell of themselves, this one among them.
            is_new: this rank had no part in the former group.

        Raises:
            LostError: some workers have ended a call of ``run.reduce()`` in which others wait, who
                would wait for ever.
        """
        told = {each["reductions"] for each in others}
        if len(told) > 1:
            raise LostError(
                "a rank was lost while run.reduce() was under way, which some had ended"
            )
        if is_new and told:
            (self.reductions,) = told
            self.epoch = self.first_epoch = max(each["epoch"] for each in others)
