"""Refused gradients and messages, how they are reported to rank 0, and the loss scale."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from aladdin_mpi.control.tags import COORDINATOR, Tag
from aladdin_mpi.flat.state import Stateful, saved
from aladdin_mpi.transport.base import Transport

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


class Reason(IntEnum):
    """Why something was refused."""

    NAN = 1
    """A bucket of a gradient holds NaN."""
    INFINITE = 2
    """It holds an infinite value, or its sum is infinite."""
    LOSS = 3
    """The batch's loss is not within ``--max-loss``."""
    LOSS_ONLY = 4
    """The loss is not finite, the gradient is: the gradient is used, the loss is not."""
    ARRIVED = 5
    """What arrived at a server is not finite, though its sender had checked it."""
    CHECKSUM = 6
    """What arrived is not what was sent."""
    SCALE = 7
    """As the first two, of a loss that was scaled for half precision."""
    UNUSED = 8
    """Nothing is refused: parameters that a batch did not use are stepped with a zero gradient."""


class Refusal(NamedTuple):
    """One refusal.

    ``rank`` is the one whose gradient or message it was. ``bucket`` is -1 where there is
    none. ``sample`` is the number of the run's sample that the batch begins at.
    ``value`` is the loss, or the tag of a message. ``in_a_row`` counts the rank's last
    steps, all of which were refused.
    """

    reason: int
    rank: int
    bucket: int = -1
    sample: int = -1
    value: float = 0.0
    in_a_row: int = 0

    def pack(self) -> Tensor:
        """As a message."""
        return torch.tensor(self, dtype=torch.float64)

    @staticmethod
    def unpack(message: Tensor) -> Refusal:
        """The inverse of :meth:`pack`, from the message's bytes."""
        reason, rank, bucket, sample, value, in_a_row = message.view(torch.float64).tolist()
        return Refusal(int(reason), int(rank), int(bucket), int(sample), value, int(in_a_row))


NBYTES = 8 * len(Refusal._fields)
"""Of a message."""


def report(transport: Transport, refusal: Refusal) -> None:
    """Tell rank 0. Never waits; a message handler may call it."""
    transport.isend(refusal.pack(), COORDINATOR, Tag.REFUSAL)
