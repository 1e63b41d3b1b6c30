"""One step of a worker: the forward and backward pass, real or modelled, and its outcome."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from aladdin_mpi.accelerator import CopyStream, is_accelerator
from aladdin_mpi.control.budget import SampleLease
from aladdin_mpi.control.refusals import Found, GradientCheck, found_in
from aladdin_mpi.flat.gradients import BucketWatch
from aladdin_mpi.flat.layout import Bucket, Layout
from aladdin_mpi.flat.replica import PhantomReplica, Replica
from aladdin_mpi.options.general import FORWARD_SHARE
from aladdin_mpi.transport.base import Event, IdleUntil, Transport, await_event, sleep_between

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


class Outcome(NamedTuple):
    """Of the step of ``lease``: ``found`` is what its gradient is refused for."""

    lease: SampleLease
    loss: float | None
    found: Found | None


class _Coming(NamedTuple):
    """Numbers that are on their way from a device: sums of buckets, then perhaps the loss."""

    numbers: Tensor
    event: Event
    buckets: list[int]

    def read(self, outcome: Outcome) -> Outcome:
        sums, rest = self.numbers.tolist(), len(self.buckets)
        loss = sums[rest] if len(sums) > rest else outcome.loss
        found = outcome.found or found_in(sums[:rest], self.buckets)
        return outcome._replace(loss=loss, found=found)


class Outcomes:
    """Those of a worker's steps, in order.

    Args:
        device: what computes.
    """

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self._transport = transport
        self._copies = CopyStream(device) if is_accelerator(device) else None
        self._unread: deque[tuple[Outcome, _Coming | None]] = deque()
        self.lag = 0 if self._copies is None else 1
        """Steps whose outcome may still be coming when the next one has been given out."""

    def __len__(self) -> int:
        """How many have not been read."""
        return len(self._unread)

    def note(self, lease: SampleLease, loss: float | Tensor | None, check: GradientCheck) -> None:
        """A step has been computed, or given to the device."""
        there = list(check.sums)
        known: float | None = None
        if not isinstance(loss, torch.Tensor):
            known = loss
        elif self._copies is None:
            known = loss.item()  # of another device than the model's
        else:
            there.append(loss)
        coming = self._send(there, check.buckets) if there else None
        self._unread.append((Outcome(lease, known, check.found), coming))

    def _send(self, there: list[Tensor], buckets: list[int]) -> _Coming:
        assert self._copies is not None
        numbers = torch.stack([each.detach().float().reshape(()) for each in there])
        room = torch.empty(len(there), pin_memory=True)
        return _Coming(room, self._copies.copy(numbers, room), buckets)

    def read(self, lag: int = 0) -> Iterator[Outcome]:
        """All but the newest ``lag``, oldest first; waits for what is still coming."""
        while len(self._unread) > lag:
            outcome, coming = self._unread.popleft()
            if coming is not None:
                await_event(self._transport, coming.event)
                outcome = coming.read(outcome)
            yield outcome


OnBucket = Callable[[Bucket], None]


class Skip(Enum):
    """In place of a loss: nothing was computed, and the gradient is zero."""

    SKIPPED = "skipped"


SKIPPED = Skip.SKIPPED
Loss: TypeAlias = "float | Tensor | Skip | None"
Compute = Callable[[SampleLease], Loss]
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
        pace: StepTimeModel,
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

    def compute_into(self, vector: Tensor, batch: SampleLease) -> float | Tensor | None:
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
        pace: StepTimeModel,
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

    def compute_into(self, vector: Tensor, batch: SampleLease) -> float | Tensor | None:
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
        sleep_between(self._transport, moments, self._end_bucket, self.idle_until)

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
