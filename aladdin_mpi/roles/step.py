"""A step's forward and backward pass: as long as it really takes, or in modelled time."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TypeAlias

from torch import Tensor

from aladdin_mpi.control.budget import Ticket
from aladdin_mpi.model.bucket_watch import BucketWatch
from aladdin_mpi.model.layout import Bucket, Layout
from aladdin_mpi.model.replica import PhantomReplica, Replica
from aladdin_mpi.roles.pace import Pace
from aladdin_mpi.transport.base import IdleUntil, Transport

OnBucket = Callable[[Bucket], None]


class Skip(Enum):
    """In place of a loss: nothing was computed, and the gradient is zero."""

    SKIPPED = "skipped"


SKIPPED = Skip.SKIPPED
Loss: TypeAlias = "float | Tensor | Skip | None"
Compute = Callable[[Ticket], Loss]
"""Does forward and backward of a batch into the bound gradients and returns the loss; None:
there is none. A tensor: a device is computing it."""


class RealStep:
    """A step that takes its time, told of by autograd as its buckets are completed.

    Args:
        pace: only its ``slowdown`` counts: that much longer it takes.
        on_bucket: called for every bucket, in order.
        wait_free: during backward; otherwise when that is over.
    """

    before_forward: OnBucket | None = None
    idle_until: IdleUntil | None = None

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        replica: Replica,
        compute: Compute,
        pace: Pace,
        on_bucket: OnBucket,
        wait_free: bool,
    ) -> None:
        self._transport = transport
        self._replica = replica
        self._compute = compute
        self._slowdown = pace.slowdown
        self._last: float | None = None
        """Seconds that the last step has computed."""
        self.watch: BucketWatch | None = replica.watch(
            layout, lambda index: on_bucket(layout.buckets[index]), wait_free
        )

    def compute_into(self, vector: Tensor, batch: Ticket) -> float | Tensor | None:
        """The batch's gradient, into the flat ``vector``; returns the loss."""
        assert self.watch is not None
        _bind(self._replica, vector)
        # A slow worker's gradient leaves at the end of its step, as old as that is long: so it
        # sleeps before it computes, as long as the last step says. The first one sleeps behind.
        self._sleep()
        is_first, start = self._last is None, self._transport.now()
        self.watch.begin()
        loss = _end_backward(self._replica, self._compute(batch))
        self.watch.end()
        self._last = self._transport.now() - start
        if is_first:
            self._sleep()
        return loss

    def _sleep(self) -> None:
        if self._slowdown > 1 and self._last is not None:
            self._transport.sleep((self._slowdown - 1) * self._last)

    def close(self) -> None:
        """Take the hooks off the model."""
        if self.watch is not None:
            self.watch.close()


class ModelledStep:
    """A step whose duration is modelled: buckets are completed as ``pace`` says.

    ``before_forward`` is called for every bucket, last first, when the forward pass comes to it;
    it may wait. Real gradients are then computed between the forward pass, which is modelled
    first, and the backward pass.

    Args:
        seconds: of a step on a plain worker.
        pace: how far this worker's differ.
        on_bucket: called for every bucket, in order.
    """

    watch: BucketWatch | None = None
    idle_until: IdleUntil | None = None
    """How long ``on_bucket`` would do nothing: see :meth:`Transport.sleep_between`."""

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        replica: Replica | PhantomReplica,
        compute: Compute,
        seconds: float,
        pace: Pace,
        on_bucket: OnBucket,
    ) -> None:
        self._transport = transport
        self._layout = layout
        self._replica = replica
        self._compute = compute
        self._seconds = seconds
        self._pace = pace
        self._on_bucket = on_bucket
        self.before_forward: OnBucket | None = None
        self._ends = [pace.completed(bucket.stop / layout.numel) for bucket in layout.buckets]
        """When each bucket is complete, as a share of the step."""

    def compute_into(self, vector: Tensor, batch: Ticket) -> float | Tensor | None:
        """The batch's gradient, into the flat ``vector``; returns the loss."""
        _bind(self._replica, vector)
        duration = self._pace.duration(self._seconds)
        start = self._pass_forward(self._transport.now(), duration)
        loss = _end_backward(self._replica, self._compute(batch))
        self._pass_backward(start, duration)
        return loss

    def _pass_forward(self, start: float, duration: float) -> float:
        """Let the forward pass's time pass, if somebody asks for it; when it began, less waits."""
        if self.before_forward is None:
            return start
        for bucket in reversed(self._layout.buckets):
            self.before_forward(bucket)
            share = bucket.numel / self._layout.numel
            self._transport.sleep(duration * self._pace.forward * share)
        return self._transport.now() - duration * self._pace.forward

    def _pass_backward(self, start: float, duration: float) -> None:
        """Let the step's time pass."""
        moments = [start + duration * share for share in self._ends]
        self._transport.sleep_between(moments, self._end_bucket, self.idle_until)

    def _end_bucket(self, index: int) -> None:
        self._on_bucket(self._layout.buckets[index])

    def close(self) -> None:
        """Nothing is left on the model."""


def _bind(replica: Replica | PhantomReplica, vector: Tensor) -> None:
    replica.bind_gradients(vector)
    replica.keep_buffers()


def _end_backward(replica: Replica | PhantomReplica, loss: Loss) -> float | Tensor | None:
    """The loss, with the gradients where they belong."""
    is_skipped = isinstance(loss, Skip)
    if isinstance(replica, Replica):
        replica.end_backward(is_skipped=is_skipped)
    return None if isinstance(loss, Skip) else loss
