"""Timing of a worker's model requests, and the compression of messages.

A model sent as soon as a gradient has arrived waits in the worker's inbox for most of a step,
and ages. So the worker requests it for a moment of its next step, given as the share f of the
gradient that has reached the server by then: a server needs no clock or timer. f decreases when
models arrive too late, and increases slowly while they arrive in time.
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
"""Headroom below which a thriftier level is tried."""
WIDE = 0.8
"""Headroom above which the next more generous level is tried."""
GAIN = 0.1
"""Rounds by which the age of gradients must decrease for a thriftier level to be kept."""
SETTLE = 30
"""Steps after a change before the headroom is used again."""
PAUSE_GROWTH = 4
"""Growth factor of the pause (initially ``SETTLE``) after each unsuccessful trial."""
LONGEST = 2000
"""Longest pause, in steps."""
SHARE = 0.05
"""Weight of the newest step in the running mean of the headroom."""


class Level(NamedTuple):
    """Bits per value of gradients and models, and a model for every ``pi`` gradients."""

    bits: int
    pi: int


class CompressionController(Stateful):
    """Controller of one worker's compression level.

    Args:
        levels: levels from generous to thrifty.
    """

    SAVED = saved("_at", "_measure", "_steps", "_trial", "_pause")

    def __init__(self, levels: tuple[Level, ...]) -> None:
        self._levels = levels
        self._at = 0
        self._measure = 0.5
        self._steps = 0
        self._trial: tuple[int, float] | None = None
        """The level from which thriftier ones are being tried, and the age at that level."""
        self._pause = SETTLE

    @property
    def level(self) -> Level:
        """The current level."""
        return self._levels[self._at]

    def end_step(self, measure: float, age: float) -> Level:
        """Record a step's headroom and the age of gradients; return the new level."""
        self._steps += 1
        self._measure += SHARE * (measure - self._measure)
        if self._steps >= SETTLE and self._trial is not None:
            self._judge(*self._trial, age)
        elif self._steps >= self._pause:
            self._move(age)
        return self.level

    def _judge(self, origin: int, before: float, age: float) -> None:
        """Decide whether the thriftier level has reduced the age."""
        if age <= before - GAIN:
            self._trial, self._pause = None, 2 * SETTLE
        elif self._measure < 0 and self._at + 1 < len(self._levels):
            self._set_level(self._at + 1)
        else:
            self._trial, self._pause = None, min(PAUSE_GROWTH * self._pause, LONGEST)
            self._set_level(origin)

    def _move(self, age: float) -> None:
        if self._measure < TIGHT and self._at + 1 < len(self._levels):
            self._trial = self._at, age
            self._set_level(self._at + 1)
        elif self._measure > WIDE and self._at:
            # If that is too generous, the way back is tried later, with a growing pause.
            self._pause = min(PAUSE_GROWTH * self._pause, LONGEST)
            self._set_level(self._at - 1)

    def _set_level(self, level: int) -> None:
        self._at = level
        self._steps = 0


MOMENTS = 8
"""Smallest number of buckets of each server, unless they would be tiny."""
LEAST_BUCKET_MB = 0.064
"""Smallest bucket; below this size the cost of a message exceeds that of its bytes."""
FIRST_SHARE = 0.5
"""Initial f of a worker."""
LATER = 0.01
"""Increase of f after a step for which all models arrived in time."""
FIRST_LATER = 0.05
"""The same until a model arrives late for the first time, to use a run's first rounds."""
EARLIER = 0.2
"""Decrease of f after a step for which no model arrived in time."""


class ModelRequestScheduler(Stateful):
    """Scheduler of one worker's model requests, per server, as latencies differ.

    Args:
        buckets: number of buckets of each server.
        share: fixed f; None: adaptive.
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
        """Share of the buckets that were late, over the run."""

    def open(self) -> None:
        """Start a segment, which counts gradients from 0."""
        for newest in self._newest:
            newest.clear()

    def note(self, server: int, bucket: int, during: int) -> None:
        """Record the arrival of a bucket's model, sent while gradient ``during`` arrived."""
        self._newest[server][bucket] = during

    def end_step(self, number: int) -> float:
        """End gradient ``number``, during which models were requested; they are read after it.

        Returns the share of the buckets without a model sent during this gradient.
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
        """Mean f over all buckets."""
        weighted = zip(self.shares, self._buckets, strict=True)
        return sum(share * buckets for share, buckets in weighted) / sum(self._buckets)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`; earlier versions did not save ``rises``."""
        super().load_state_dict({"rises": [LATER] * len(self.shares), **state})


def fine_layout(replica: Replica | PhantomReplica, workers: int, options: GeneralOptions) -> Layout:
    """Return small buckets, interleaved so that a server can follow a worker's backward pass.

    They are assigned to the servers in turn, one by one: with a shard of several buckets, a server
    would get gradients from a short part of backward only, and send its models right after it.
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
    """Return the bucket, counted from 0, of a server's ``buckets`` after which it sends models."""
    return max(1, ceil(share * buckets)) - 1
