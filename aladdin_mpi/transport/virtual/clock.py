"""Virtual time: a clock that jumps from event to event."""

from __future__ import annotations

import random
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

EARLY = -1.0
"""Of the events of one time: before all others."""
LATE = 1.0
"""Of the events of one time: after the arrival of all messages."""

Action = Callable[[Any], None]
_Event = tuple[float, float, int, Action, Any]


class Clock:
    """Events in the order of their time; the order of equal times is drawn at random.

    ``random`` is the only source of chance of the engine, so that a run depends on
    its arguments and its seed alone.
    """

    __slots__ = ("_events", "_number", "_seed", "_stopped", "at", "now", "pass_by", "random")

    at: Callable[..., None]
    """``at(time, action, argument, turn=0.0)``: have ``action(argument)`` called at ``time``;
    ``turn`` is 0, EARLY or LATE."""
    pass_by: Callable[[], object]
    """Draw what :meth:`at` would for an event that is met without it: see :meth:`next_due`."""

    def __init__(self, seed: int, start_time: float) -> None:
        self.now = start_time
        self._seed = seed
        self._events: list[_Event] = []
        self._number = count().__next__
        self._stopped = False
        self.reseed()

    def reseed(self, *key: int) -> None:
        """Start the random numbers anew from the seed and ``key``."""
        self.random = random.Random("/".join(map(str, (self._seed, *key))))
        self.at = _scheduler(self._events, self.random.random, self._number)
        self.pass_by = self.random.random

    def next_due(self) -> float:
        """The time of the event to come.

        What happens before it may be done at once, at the end of the present event, if each time
        :attr:`pass_by` is called and ``now`` set: the run is the same as with an event for it.
        """
        if self._stopped:
            return self.now
        return self._events[0][0] if self._events else inf

    def run(self) -> bool:
        """Go from event to event until :meth:`stop` is called; False: there was none left."""
        events, pop = self._events, heappop
        self._stopped = False
        while not self._stopped:
            if not events:
                return False
            self.now, _, _, action, argument = pop(events)
            action(argument)
        return True

    def stop(self) -> None:
        """Let :meth:`run` end with the present event."""
        self._stopped = True


def _scheduler(
    events: list[_Event], draw: Callable[[], float], number: Callable[[], int]
) -> Callable[..., None]:
    # A function with all that it needs at hand: it is called for every piece of every message.
    push = heappush

    def at(time: float, action: Action, argument: Any, turn: float = 0.0) -> None:
        push(events, (time, turn + draw(), number(), action, argument))

    return at
