"""The computing of one step: its function, and a step whose duration is modelled."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from torch import Tensor

from aladdin_mpi.control.budget import SampleLease
from aladdin_mpi.flat.gradients import BucketWatch, OnBucket
from aladdin_mpi.flat.layout import Layout
from aladdin_mpi.flat.replica import PhantomReplica, Replica
from aladdin_mpi.options.general import FORWARD_SHARE
from aladdin_mpi.transport.base import IdleUntil, Transport, sleep_between

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
class StepTimeModel:
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


class Skip(Enum):
    """In place of a loss: nothing was computed, and the gradient is zero."""

    SKIPPED = "skipped"


SKIPPED = Skip.SKIPPED
Loss: TypeAlias = "float | Tensor | Skip | None"
Compute = Callable[[SampleLease], Loss]
"""Does forward and backward of a batch into the bound gradients and returns the loss; None:
there is none. A tensor: a device is computing it."""


class ModelledStep:
    """A step whose duration is modelled: buckets are completed as ``pace`` says.

    Args:
        seconds: of a step on a plain worker.
        pace: how far this worker's differ.
    """

    watch: BucketWatch | None = None

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        replica: Replica | PhantomReplica,
        compute: Compute,
        seconds: float,
        pace: StepTimeModel,
    ) -> None:
        self._transport = transport
        self._layout = layout
        self._replica = replica
        self._compute = compute
        self._seconds = seconds
        self._pace = pace
        self._ends = [pace.completed(bucket.stop / layout.numel) for bucket in layout.buckets]
        """When each bucket is complete, as a share of the step."""

    def compute_into(
        self,
        vector: Tensor,
        batch: SampleLease,
        on_bucket: OnBucket,
        idle_until: IdleUntil | None = None,
        before_forward: OnBucket | None = None,
    ) -> float | Tensor | None:
        """Compute the batch's gradient into the flat ``vector``; return the loss.

        Args:
            vector: its contents are overwritten.
            batch: the samples.
            on_bucket: called for every bucket, in order.
            idle_until: how long that would have no effect: see :meth:`Transport.sleep_between`.
            before_forward: called for every bucket, last first, when the forward pass comes to
                it; it may wait. Real gradients are then computed between the forward pass, which
                is modelled first, and the backward pass.
        """
        self._replica.bind_gradients(vector)
        self._replica.keep_buffers()
        duration = self._pace.duration(self._seconds)
        start = self._transport.now()
        if before_forward is not None:
            start = self._pass_forward(duration, before_forward)
        loss = self._compute(batch)
        is_skipped = isinstance(loss, Skip)
        if isinstance(self._replica, Replica):
            self._replica.end_backward(is_skipped)
        buckets = self._layout.buckets
        moments = [start + duration * share for share in self._ends]
        sleep_between(self._transport, moments, lambda index: on_bucket(buckets[index]), idle_until)
        return None if isinstance(loss, Skip) else loss

    def _pass_forward(self, duration: float, before_forward: OnBucket) -> float:
        """Let the forward pass's time pass; return when it began, less waits."""
        for bucket in reversed(self._layout.buckets):
            before_forward(bucket)
            share = bucket.numel / self._layout.numel
            self._transport.sleep(duration * self._pace.forward * share)
        return self._transport.now() - duration * self._pace.forward

    def close(self) -> None:
        """Nothing is left on the model."""
