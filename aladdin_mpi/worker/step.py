"""Computation of one step: its function, and a step of simulated duration."""

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
"""Progress of backward: pairs of a share of the gradient, last layer first, and the share of
backward's time after which it is complete; linear between points, (0, 0) and (1, 1)."""


def interpolated(shape: Shape, share: float) -> float:
    """Return the share of backward's time after which a share of the gradient is complete."""
    before = (0.0, 0.0)
    for point in (*shape, (1.0, 1.0)):
        if share <= point[0] and point[0] > before[0]:
            part = (share - before[0]) / (point[0] - before[0])
            return before[1] + part * (point[1] - before[1])
        before = point
    return 1.0


@dataclass
class StepTimeModel:
    """Duration of a step's computation.

    Args:
        seconds: duration of a step on a worker without slowdown; None: real time.
        slowdown: this worker's slowdown factor, >= 1.
        jitter: standard deviation of the logarithm of a step's duration.
        seed: random seed of the jitter; different for each worker.
        forward: the forward pass's share of a simulated step.
        backward: progress of a simulated backward pass; empty: linear.
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
        """Return a step's simulated duration; it takes ``seconds`` without slowdown."""
        factor = self.random.lognormvariate(0.0, self.jitter) if self.jitter else 1.0
        return seconds * self.slowdown * factor

    def completed(self, share: float) -> float:
        """Return the share of a simulated step after which a share of the gradient is complete."""
        progress = interpolated(self.backward, share) if self.backward else share
        return self.forward + (1 - self.forward) * progress


class Skip(Enum):
    """Replacement of a loss: nothing was computed, and the gradient is zero."""

    SKIPPED = "skipped"


SKIPPED = Skip.SKIPPED
Loss: TypeAlias = "float | Tensor | Skip | None"
Compute = Callable[[SampleLease], Loss]
"""Function that runs forward and backward of a batch into the bound gradients and returns the
loss, if any, as a tensor if a device is still computing it."""


class ModelledStep:
    """A step of simulated duration, whose buckets are completed according to ``pace``.

    Args:
        seconds: duration of a step without slowdown.
        pace: this worker's duration model.
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
        """Completion of each bucket, as a share of the step."""

    def compute_into(
        self,
        vector: Tensor,
        batch: SampleLease,
        on_bucket: OnBucket,
        idle_until: IdleUntil | None = None,
        before_forward: OnBucket | None = None,
    ) -> Loss:
        """Compute the batch's gradient into the flat ``vector``; return the loss.

        Args:
            vector: its contents are overwritten.
            batch: the samples.
            on_bucket: called for every bucket, in order.
            idle_until: when ``on_bucket`` next has an effect, see :meth:`Transport.sleep_between`.
            before_forward: called for every bucket, last first, when the forward pass reaches it;
                it may wait. Real gradients are then computed between the simulated forward and
                backward passes.
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
        return loss

    def _pass_forward(self, duration: float, before_forward: OnBucket) -> float:
        """Simulate the forward pass; return its start, excluding waits."""
        for bucket in reversed(self._layout.buckets):
            before_forward(bucket)
            share = bucket.numel / self._layout.numel
            self._transport.sleep(duration * self._pace.forward * share)
        return self._transport.now() - duration * self._pace.forward

    def close(self) -> None:
        """Do nothing: the model has no hooks."""
