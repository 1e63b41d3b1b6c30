"""How much a worker and its servers send each other, by the room that they find.

The measure is f, the share of the next gradient that a server can wait for before it sends a
model that still comes in time (:mod:`~aladdin_mpi.algorithms.just_in_time`), less the share of
late models and of gradients that had to be added to another. Where it is small, the next
thriftier level is tried, and kept if that helps: where a latency is the reason and not the
bytes, nothing is gained by sending less. Where there is room for more, a level is given back.
"""

from __future__ import annotations

from typing import NamedTuple

TIGHT = 0.35
"""Below this measure a thriftier level is tried."""
WIDE = 0.8
"""Above it the next more generous one is."""
GAIN = 0.05
"""By which a thriftier level has to raise the measure to be kept."""
SETTLE = 30
"""Steps after a change before the measure is believed again."""
LONGEST = 1000
"""Steps between two trials of a level that was no good, at most; at first ``SETTLE``."""
SHARE = 0.05
"""Of the newest step in the running mean of the measure."""


class Level(NamedTuple):
    """What is sent: gradients and models in so many bits, a model for every ``pi`` gradients."""

    bits: int
    pi: int


class Room:
    """One worker's level.

    Args:
        levels: from generous to thrifty.
    """

    def __init__(self, levels: tuple[Level, ...]) -> None:
        self._levels = levels
        self._at = 0
        self._measure = 0.5
        self._steps = 0
        self._before: float | None = None
        self._pause = SETTLE

    @property
    def level(self) -> Level:
        """The present one."""
        return self._levels[self._at]

    def end_step(self, measure: float) -> Level:
        """Take note of a step's measure; the level from now on."""
        self._steps += 1
        self._measure += SHARE * (measure - self._measure)
        if self._steps >= SETTLE and self._before is not None:
            self._judge()
        elif self._steps >= self._pause:
            self._move()
        return self.level

    def _judge(self) -> None:
        """Was the thriftier level of any use?"""
        assert self._before is not None
        helped = self._measure >= self._before + GAIN
        self._before = None
        if helped:
            self._pause = SETTLE
        else:
            self._go(-1)
            self._pause = min(2 * max(self._pause, SETTLE), LONGEST)

    def _move(self) -> None:
        if self._measure < TIGHT and self._at + 1 < len(self._levels):
            self._before = self._measure
            self._go(1)
        elif self._measure > WIDE and self._at:
            self._go(-1)
            # If that was too much the way back is tried soon, and the next time later.
            self._pause = min(2 * self._pause, LONGEST)

    def _go(self, by: int) -> None:
        self._at += by
        self._steps = 0

    def state_dict(self) -> dict[str, object]:
        """Everything that the next segment depends on."""
        names = ("_at", "_measure", "_steps", "_before", "_pause")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Take up a state from :meth:`state_dict`."""
        for name, value in state.items():
            setattr(self, name, value)
