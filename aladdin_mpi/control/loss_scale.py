"""The factor of losses in half precision, whose gradients would be too small without it.

As in mixed-precision training (Micikevicius et al., ICLR 2018, section 3.2): halved when a gradient
overflows, doubled after many that did not. All workers have the same: rank 0 keeps it, and each
grant of samples says it, so that the workers of a round do not differ.
"""

from __future__ import annotations

from aladdin_mpi.model.saved import Stateful, saved

FIRST, LARGEST = 16, 24
"""Powers of two."""
PATIENCE = 2000
"""Steps of all workers without an overflow after which it is doubled."""


class LossScale(Stateful):
    """Kept by rank 0: the scale is 2 to the power of ``exponent``."""

    SAVED = saved("exponent", "sound", "since")

    def __init__(self) -> None:
        self.exponent = FIRST
        self.sound = 0
        """Steps since it was changed."""
        self.since = 0
        """The first sample that was granted when it had been halved."""

    def count(self) -> None:
        """A worker has reported a step."""
        self.sound += 1
        if self.sound >= PATIENCE:
            self.exponent = min(self.exponent + 1, LARGEST)
            self.sound = 0

    def overflowed(self, sample: int, drawn: int) -> bool:
        """A gradient has overflowed; whether the scale is halved for that.

        It is not where the step had the scale before the last halving.

        Args:
            sample: of the run, that the step began at.
            drawn: samples granted so far.
        """
        if sample < self.since or not self.exponent:
            return False
        self.exponent -= 1
        self.sound, self.since = 0, drawn
        return True
