"""The ranks that have died, or are treated so, and who is to be told of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from aladdin_mpi.transport.mpi import fault_tolerance, library  # before MPI: how it begins and ends

# isort: split
from mpi4py import MPI

LOOK_FOR_FAILURES = 0.02
"""Seconds between two looks for ranks that have died."""
NAMED_WITHIN = 10.0
"""Longest time in seconds from an operation's end by a death to the name of who has died."""


class MpiFailures:
    """Who has failed.

    ``survives``: the others go on after a death. ``failed`` has all ranks that are dead to this
    one, ``excluded`` those among them that may live. ``untold`` waits for :meth:`tell`.
    """

    def __init__(self, messages: MPI.Intracomm) -> None:
        self.survives = library.SURVIVES
        self.failed: frozenset[int] = frozenset()
        self.excluded: frozenset[int] = frozenset()
        self.untold: deque[int] = deque()
        self._messages = messages
        self._actions: list[Callable[[int], None]] = []
        self._look_again = 0.0

    def may_be_death(self, error: MPI.Exception, of_collective: bool) -> bool:
        """Whether this rank goes on, since a death explains the error.

        Open MPI ends a collective between two of whose rounds a rank dies with any error.
        """
        return self.survives and (
            of_collective or error.Get_error_class() in fault_tolerance.DEATHS
        )

    def is_lost(self, rank: int) -> bool:
        """Whether MPI knows by now that the rank has died, though no look has found it yet.

        Where the connection to it is gone Open MPI's MPI_Isend crashes (5.0, in ob1). To ask
        takes a fifth of a microsecond.
        """
        if not self.survives:
            return False
        group = self._messages.Get_failed()
        is_news = group.size > len(self.failed - self.excluded)
        group.Free()
        return is_news and rank in fault_tolerance.dead(self._messages)

    def found(self, at_once: bool = False) -> list[int]:
        """Ranks that have died since the last look; none if that was just now.

        They are found here where no operation of this rank has met them.
        """
        now = time.perf_counter()
        if now < self._look_again and not at_once:
            return []
        self._look_again = now + LOOK_FOR_FAILURES
        return sorted(fault_tolerance.dead(self._messages) - self.failed)

    def add(self, rank: int) -> None:
        """A rank has died."""
        self.failed |= {rank}
        self.untold.append(rank)

    def exclude(self, rank: int) -> None:
        """A rank is treated as if it had died."""
        self.excluded |= {rank}
        self.add(rank)

    def on_failure(self, action: Callable[[int], None]) -> None:
        """Call ``action`` with each rank that fails."""
        self._actions.append(action)

    def tell(self, before: Callable[[int], None]) -> None:
        """Say who has failed, first to ``before``; as a message handler does."""
        while self.untold:
            rank = self.untold.popleft()
            before(rank)
            for action in self._actions:
                action(rank)
