"""How much a worker and its servers send each other, by the room that they find.

The measure is f, the share of the next gradient that a server can wait for before it sends a
model that still comes in time (:mod:`~aladdin_mpi.parameter_server.just_in_time`), less the
share of late models and of gradients that had to be added to another. Where it is small, the next
thriftier level is tried, and kept if gradients are younger then: where a latency is the reason
and not the bytes, nothing is gained by sending less. Only where most models are late does a
trial go further, as on links that are overfull one level may show nothing. Where there is room
for more, a level is given back.
"""

from __future__ import annotations

from typing import NamedTuple

from aladdin_mpi.model.saved import Stateful, saved

TIGHT = 0.35
"""Below this measure a thriftier level is tried."""
WIDE = 0.8
"""Above it the next more generous one is."""
GAIN = 0.1
"""Rounds by which gradients have to be younger for a thriftier level to be kept."""
SETTLE = 30
"""Steps after a change before the measure is believed again."""
LATER = 4
"""How many times as long the pause is after each trial that was no good; at first ``SETTLE``."""
LONGEST = 2000
"""Steps of such a pause, at most."""
SHARE = 0.05
"""Of the newest step in the running mean of the measure."""


class Level(NamedTuple):
    """What is sent: gradients and models in so many bits, a model for every ``pi`` gradients."""

    bits: int
    pi: int


class Room(Stateful):
    """One worker's level.

    Args:
        levels: from generous to thrifty.
    """

    SAVED = saved("_at", "_measure", "_steps", "_trial", "_pause")

    def __init__(self, levels: tuple[Level, ...]) -> None:
        self._levels = levels
        self._at = 0
        self._measure = 0.5
        self._steps = 0
        self._trial: tuple[int, float] | None = None
        """The level from which thriftier ones are being tried, and the age there."""
        self._pause = SETTLE

    @property
    def level(self) -> Level:
        """The present one."""
        return self._levels[self._at]

    def end_step(self, measure: float, age: float) -> Level:
        """Take note of a step's measure and of the age of gradients; the level from now on."""
        self._steps += 1
        self._measure += SHARE * (measure - self._measure)
        if self._steps >= SETTLE and self._trial is not None:
            self._judge(*self._trial, age)
        elif self._steps >= self._pause:
            self._move(age)
        return self.level

    def _judge(self, origin: int, before: float, age: float) -> None:
        """Was the thriftier level of any use?"""
        if age <= before - GAIN:
            self._trial, self._pause = None, 2 * SETTLE
        elif self._measure < 0 and self._at + 1 < len(self._levels):
            self._go(self._at + 1)
        else:
            self._trial, self._pause = None, min(LATER * self._pause, LONGEST)
            self._go(origin)

    def _move(self, age: float) -> None:
        if self._measure < TIGHT and self._at + 1 < len(self._levels):
            self._trial = self._at, age
            self._go(self._at + 1)
        elif self._measure > WIDE and self._at:
            # If that is too much the way back is tried later, and later the next time.
            self._pause = min(LATER * self._pause, LONGEST)
            self._go(self._at - 1)

    def _go(self, level: int) -> None:
        self._at = level
        self._steps = 0
