"""How long a step's computing takes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

FORWARD_SHARE = 1 / 3
"""Share of a step's computing that is the forward pass, in modelled time."""


@dataclass
class Pace:
    """How long a step's computing takes.

    Args:
        seconds: of one step on a worker that is not slowed down; None: as long as
            it really takes.
        slowdown: this worker's factor, >= 1.
        jitter: relative standard deviation of the time of one step, lognormal.
        seed: of the jitter; give each worker its own.
    """

    seconds: float | None = None
    slowdown: float = 1.0
    jitter: float = 0.0
    seed: int = 0
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def duration(self, seconds: float) -> float:
        """Modelled seconds of the next step, which takes ``seconds`` on a plain worker."""
        factor = self.random.lognormvariate(0.0, self.jitter) if self.jitter else 1.0
        return seconds * self.slowdown * factor
