"""How long a step's computing takes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from aladdin_mpi.options.general import FORWARD_SHARE

Shape = Sequence[tuple[float, float]]
"""Of backward: shares of the gradient, last layer first, with the shares of backward's time after
which they are there, both rising; between two points, and to (0, 0) and (1, 1), in proportion."""


def interpolated(shape: Shape, share: float) -> float:
    """The share of backward's time after which a share of the gradient is there."""
    before = (0.0, 0.0)
    for point in (*shape, (1.0, 1.0)):
        if share <= point[0] and point[0] > before[0]:
            part = (share - before[0]) / (point[0] - before[0])
            return before[1] + part * (point[1] - before[1])
        before = point
    return 1.0


@dataclass
class Pace:
    """How long a step's computing takes.

    Args:
        seconds: of one step on a worker that is not slowed down; None: as long as
            it really takes.
        slowdown: this worker's factor, >= 1.
        jitter: relative standard deviation of the time of one step, lognormal.
        seed: of the jitter; give each worker its own.
        forward: the forward pass's share of a modelled step.
        backward: when a modelled backward pass completes the gradient; empty: in proportion.
    """

    seconds: float | None = None
    slowdown: float = 1.0
    jitter: float = 0.0
    seed: int = 0
    forward: float = FORWARD_SHARE
    backward: Shape = ()
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def duration(self, seconds: float) -> float:
        """Modelled seconds of the next step, which takes ``seconds`` on a plain worker."""
        factor = self.random.lognormvariate(0.0, self.jitter) if self.jitter else 1.0
        return seconds * self.slowdown * factor

    def completed(self, share: float) -> float:
        """The share of a modelled step after which so much of the gradient is there."""
        done = interpolated(self.backward, share) if self.backward else share
        return self.forward + (1 - self.forward) * done
