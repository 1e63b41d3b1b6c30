"""Virtual time: a clock that jumps from event to event."""

from __future__ import annotations

import random
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

EARLY = -1.0
"""Of the events of one time: before all others."""
LATE = 1.0
"""Of the events of one time: after the arrival of all messages."""

Action = Callable[[Any], None]


class Clock:
    """Events in the order of their time; the order of equal times is drawn at random.

    ``random`` is the only source of chance of the engine, so that a run depends on
    its arguments and its seed alone.
    """

    __slots__ = ("_draw", "_events", "_seed", "_serial", "_stopped", "now", "random")

    def __init__(self, seed: int, start_time: float) -> None:
        self.now = start_time
        self._seed = seed
        self._events: list[tuple[float, float, int, Action, Any]] = []
        self._serial = 0
        self._stopped = False
        self.reseed()

    def reseed(self, *key: int) -> None:
        """Start the random numbers anew from the seed and ``key``."""
        self.random = random.Random("/".join(map(str, (self._seed, *key))))
        self._draw = self.random.random

    def at(self, time: float, action: Action, argument: Any, turn: float = 0.0) -> None:
        """Have ``action(argument)`` called at ``time``; ``turn`` is 0, EARLY or LATE."""
        self._serial += 1
        heappush(self._events, (time, turn + self._draw(), self._serial, action, argument))

    def run(self) -> bool:
        """Go from event to event until :meth:`stop` is called; False: there was none left."""
        events = self._events
        self._stopped = False
        while not self._stopped:
            if not events:
                return False
            self.now, _, _, action, argument = heappop(events)
            action(argument)
        return True

    def stop(self) -> None:
        """Let :meth:`run` end with the present event."""
        self._stopped = True
