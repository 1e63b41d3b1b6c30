"""When a worker requests models, and how strongly they are compressed.

A model that is sent as soon as a gradient has come waits in the worker's inbox for most of a
step, and ages. So the worker asks for it at a moment of its next step, told as the share f of
the gradient that has reached the server by then: a server needs no clock and no timer. f
falls when models come too late, and creeps up while they come in time.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any, NamedTuple

from aladdin_mpi.flat.layout import BYTES_PER_MB, BYTES_PER_VALUE, Layout, cut
from aladdin_mpi.flat.replica import PhantomReplica, Replica
from aladdin_mpi.flat.state import Stateful, saved
from aladdin_mpi.options.general import GeneralOptions

TIGHT = 0.35
"""Below this measure a thriftier level is tried."""
WIDE = 0.8
"""Above it the next more generous one is."""
GAIN = 0.1
"""Rounds by which gradients have to be younger for a thriftier level to be kept."""
SETTLE = 30
"""Steps after a change before the measure is believed again."""
PAUSE_GROWTH = 4
"""How many times as long the pause is after each trial that was no good; at first ``SETTLE``."""
LONGEST = 2000
"""Steps of such a pause, at most."""
SHARE = 0.05
"""Of the newest step in the running mean of the measure."""


class Level(NamedTuple):
    """What is sent: gradients and models in so many bits, a model for every ``pi`` gradients."""

    bits: int
    pi: int


class CompressionController(Stateful):
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
            self._trial, self._pause = None, min(PAUSE_GROWTH * self._pause, LONGEST)
            self._go(origin)

    def _move(self, age: float) -> None:
        if self._measure < TIGHT and self._at + 1 < len(self._levels):
            self._trial = self._at, age
            self._go(self._at + 1)
        elif self._measure > WIDE and self._at:
            # If that is too much the way back is tried later, and later the next time.
            self._pause = min(PAUSE_GROWTH * self._pause, LONGEST)
            self._go(self._at - 1)

    def _go(self, level: int) -> None:
        self._at = level
        self._steps = 0


MOMENTS = 8
"""Buckets that each server has at least, where they are not tiny then."""
LEAST_BUCKET_MB = 0.064
"""Below this a message costs more for itself than for its bytes."""
FIRST_SHARE = 0.5
"""f of a worker that has no experience yet."""
LATER = 0.01
"""Added to f after a step for which all models came in time."""
FIRST_LATER = 0.05
"""The same as long as none has ever come late: a run's first rounds are not to be lost."""
EARLIER = 0.2
"""Taken from f after a step for which none did."""


class ModelRequestScheduler(Stateful):
    """One worker's wishes, for each server apart: they may be near or far.

    Args:
        buckets: of each server.
        share: f where it is fixed; None: it adapts.
    """

    SAVED = saved("shares", rises="_rises") | saved("steps", "late")

    def __init__(self, buckets: list[int], share: float | None = None) -> None:
        self._buckets = buckets
        self._fixed = share
        self.shares = [FIRST_SHARE if share is None else share] * len(buckets)
        self._rises = [FIRST_LATER] * len(buckets)
        self._newest: list[dict[int, int]] = [{} for _ in buckets]
        self.steps = 0
        self.late = 0.0
        """Share of the buckets that came late, over the run."""

    def open(self) -> None:
        """Begin a segment: its gradients are counted anew."""
        for newest in self._newest:
            newest.clear()

    def note(self, server: int, bucket: int, during: int) -> None:
        """A bucket's model is there, which was sent while gradient ``during`` came in."""
        self._newest[server][bucket] = during

    def end_step(self, number: int) -> float:
        """Gradient ``number``, during which models were asked for, is complete and they are read.

        Returns the share of the buckets of which none sent during this gradient is among them.
        """
        missing = 0.0
        for server, buckets in enumerate(self._buckets):
            timely = sum(during >= number for during in self._newest[server].values())
            late = 1 - timely / buckets
            missing += late * buckets
            self._adapt(server, late)
        share = missing / sum(self._buckets)
        self.steps += 1
        self.late += (share - self.late) / self.steps
        return share

    def _adapt(self, server: int, late: float) -> None:
        if self._fixed is None:
            if late:
                self._rises[server] = LATER
            f = self.shares[server] + self._rises[server] * (1 - late) - EARLIER * late
            self.shares[server] = min(max(f, 0.0), 1.0)

    @property
    def mean_share(self) -> float:
        """The mean f of all buckets."""
        weighted = zip(self.shares, self._buckets, strict=True)
        return sum(share * buckets for share, buckets in weighted) / sum(self._buckets)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state from :meth:`state_dict`; those of earlier versions have no rises."""
        super().load_state_dict({"rises": [LATER] * len(self.shares), **state})


def fine_layout(replica: Replica | PhantomReplica, workers: int, options: GeneralOptions) -> Layout:
    """Buckets so small, and dealt so, that a server can tell how far a worker's backward pass is.

    They are dealt to the servers in turn, one by one: in a shard of several a server would have
    gradients from a short part of the backward pass only, and send its models right behind it.
    """
    megabytes = replica.numel * BYTES_PER_VALUE / BYTES_PER_MB / options.servers
    bucket_mb = min(options.bucket_mb, max(megabytes / MOMENTS, LEAST_BUCKET_MB))
    return cut(
        replica.numel,
        options.servers,
        bucket_mb,
        min(options.shard_mb, bucket_mb),
        options.sharding,
        replica.layers,
    )


def due_bucket(share: float, buckets: int) -> int:
    """After which of a server's ``buckets`` of a gradient, from 0, its models are to leave."""
    return max(1, ceil(share * buckets)) - 1
