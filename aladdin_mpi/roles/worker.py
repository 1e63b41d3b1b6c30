"""What an algorithm's worker stands on: its batches, its gradients, its learning rate."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from math import isfinite, nan, sqrt
from typing import TYPE_CHECKING, Literal

from aladdin_mpi.control.budget import Draws, Report, Ticket
from aladdin_mpi.control.refusals import GradientCheck, Reason, Refusal, report
from aladdin_mpi.errors import UserError
from aladdin_mpi.model.bucket_watch import BucketWatch
from aladdin_mpi.model.layout import Bucket, Layout
from aladdin_mpi.model.replica import PhantomReplica, Replica
from aladdin_mpi.model.saved import Stateful, saved
from aladdin_mpi.model.vectors import clear, clip_norm
from aladdin_mpi.roles.former import Former
from aladdin_mpi.transport.base import Transport

if TYPE_CHECKING:
    from torch import Tensor

FORWARD_SHARE = 1 / 3
"""Share of a step's computing that is the forward pass, in modelled time."""

OnBucket = Callable[[Bucket], None]
Clips = Literal["mean", "own", "parts"]


class Skip(Enum):
    """In place of a loss: nothing was computed, and the gradient is zero."""

    SKIPPED = "skipped"


SKIPPED = Skip.SKIPPED
Loss = float | None | Skip


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

    def duration(self) -> float:
        """Modelled seconds of the next step."""
        assert self.seconds is not None
        factor = self.random.lognormvariate(0.0, self.jitter) if self.jitter else 1.0
        return self.seconds * self.slowdown * factor


def _unknown(lr: float) -> None:
    """Rank 0 knows the learning rate by itself."""


def _nothing(ticket: Ticket) -> None:
    """Nothing follows a step."""


class Worker(Stateful):
    """One worker's replica and its supply of batches and gradients.

    ``reached`` is the number of the run's samples before which this worker has done all of its
    steps, in rounds; ``index`` counts the workers from 0, ``count`` is their number and ``servers``
    that of the servers, which are ranks 0 to ``servers`` - 1.

    A gradient that is not finite is refused where it is made, so that no algorithm has to
    know: what is not sound is cleared before anybody is told of it, and everything else
    goes on as with any gradient. Rank 0 is told. ``refused`` counts such steps,
    ``in_a_row`` those at the end of the steps so far.

    Args:
        compute: does forward and backward of the current batch into the bound
            gradients and returns the loss; None: there is none.
        batch_size: samples of one step.
        schedule: learning rate as a function of the samples drawn by all workers.
        wait_free: tell of a bucket as soon as backward has completed it (wait-free
            backpropagation); otherwise of all of them when backward is over.
        lockstep: batches are parts of rounds that all workers take together.
        max_loss: refuse the gradient of a batch with a larger loss. The loss is known when
            backward is over: so nothing is told before.
        clip: largest L2 norm of a gradient.
        clips: what it is the norm of: a worker's ``own`` gradient, which is known when backward
            is over, as the loss; its ``parts``, each bucket's being held to its share, so that
            they can be told at once; or the ``mean`` of all workers', by the algorithm.
        may_clip: whether each step's gradient is clipped is said while it is computed
            (:meth:`clip_step`): nothing is told early in the first one, nor in later ones if
            that one is.
        rate: of the schedule's learning rate makes the one of the present step, where rank 0
            does not know it.
        after_step: called with a batch when the algorithm has done all that it asks for.
    """

    SAVED = saved("samples", "computed", "refused", "in_a_row", pace="pace.random")

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        replica: Replica | PhantomReplica,
        compute: Callable[[Ticket], Loss],
        pace: Pace,
        batch_size: int,
        schedule: Callable[[int], float],
        wait_free: bool = True,
        lockstep: bool = False,
        max_loss: float | None = None,
        clip: float | None = None,
        clips: Clips = "own",
        may_clip: bool = False,
        rate: Callable[[float], float | None] = _unknown,
        after_step: Callable[[Ticket], None] = _nothing,
    ) -> None:
        self.transport = transport
        self.layout = layout
        self.replica = replica
        self.parameters: Tensor = replica.parameters
        self.servers = layout.servers
        self.index = transport.rank - layout.servers
        self.count = transport.size - layout.servers
        self.pace = pace
        self.ticket = Ticket(0, 0, 0)
        self.samples = 0
        self.computed = 0
        self.refused = 0
        self.in_a_row = 0
        self.reached = 0
        self._is_stepping = False
        self._when_reached: list[tuple[int, Callable[[], None]]] = []
        self.check = GradientCheck()
        self._compute = compute
        self._batch_size = batch_size
        self._schedule = schedule
        self._draws = Draws(transport)
        self._report = Report()
        self._clips = clips
        holds_back = clips == "own" and clip is not None
        self._wait_free = wait_free and max_loss is None and not holds_back
        self._holds_back = may_clip and clips == "own"
        self._always_clip = self.clip = clip
        self._max_loss = max_loss
        self._lockstep = lockstep
        self._rate = rate
        self._after_step = after_step
        self._vector = replica.parameters
        self._completed: list[Bucket] = []
        self._on_bucket: OnBucket = _ignore
        self.before_forward: OnBucket | None = None
        """In modelled time, called for every bucket, last first, when the forward pass comes
        to it; it may wait. Real gradients are then computed between the forward pass, which
        is modelled first, and the backward pass."""
        self.watch: BucketWatch | None = None
        if pace.seconds is None:
            assert isinstance(replica, Replica)
            self.watch = replica.watch(
                layout, lambda index: self._complete(layout.buckets[index]), self._wait_free
            )

    @property
    def lr(self) -> float:
        """Learning rate of the current batch."""
        return self._schedule(self.ticket.start)

    @property
    def loss(self) -> float:
        """Loss of the step just computed; not a number with timed computing, or if refused."""
        return self._report.loss

    @property
    def share(self) -> float:
        """What the current batch's mean gradient weighs in the mean over all workers.

        It is 1 where every worker has as many samples; the mean of gradients times
        shares is that of all samples of the round.
        """
        if not self._lockstep:
            return 1.0
        return self.ticket.size * (self.count - len(self.ticket.absent)) / self.ticket.whole

    def batches(self) -> Iterator[Ticket]:
        """This worker's batches until the segment's samples are used up.

        The next one is drawn while the current one is computed, or several where the
        network is slow, so that drawing costs no waiting.
        """
        draws, end = self._draws, self.reached
        draws.open()
        draws.request(self._batch_size, self._take_report())
        while draws.outstanding:
            self.ticket = draws.take()
            if self.ticket.whole == 0:
                continue  # so are those asked for after it
            for _ in range(draws.short):
                draws.request(self._batch_size, self._take_report())
            self._reach(self.ticket.start, is_stepping=True)
            yield self.ticket
            self._after_step(self.ticket)
            end = self.ticket.start + self.ticket.whole
        self._reach(end, is_stepping=False)
        draws.report(self._take_report())

    def when_reached(self, samples: int, action: Callable[[], None]) -> None:
        """Call ``action`` when this worker has done all steps of samples before ``samples``.

        For message handlers, where workers go in rounds. It is called between two steps, as a
        handler: at the first of these moments, or at once if the segment's last step is done.
        """
        if not self._is_stepping and self.reached >= samples:
            action()
        else:
            self._when_reached.append((samples, action))

    def _reach(self, samples: int, is_stepping: bool) -> None:
        """All steps of samples before ``samples`` are done; the next one follows, or none."""
        with self.transport.atomic():
            self.reached, self._is_stepping = samples, is_stepping
            waiting, self._when_reached = self._when_reached, []
            for least, action in waiting:
                if samples >= least:
                    action()
                else:
                    self._when_reached.append((least, action))

    def _take_report(self) -> Report:
        traffic = self.transport.traffic
        report = self._report._replace(
            waiting=traffic.waiting,
            sent=traffic.bytes_sent,
            steps=self.computed,
            rate=self._rate(self.lr),
        )
        self._report = Report()
        return report

    def stop(self) -> None:
        """Ask for the end of the run."""
        self._draws.stop()

    def pass_over(self, samples: int) -> None:
        """Ask that no samples of the run before number ``samples`` are granted any more."""
        self._draws.pass_over(samples)

    def gradient(self, vector: Tensor, on_bucket: OnBucket | None = None) -> None:
        """Compute the current batch's gradient into the flat ``vector``, whatever it holds.

        ``on_bucket`` is called for every bucket, in order, as soon as it is complete:
        during backward, or spread over the modelled one; None: nobody asks. Without
        samples in the round the gradient is zero and takes no time. Of one that is refused
        at least the bucket that is not finite, and those after it, are zero.
        """
        on_bucket = on_bucket or _ignore
        tells_at_once = self._wait_free and not self._holds_back
        self._on_bucket = on_bucket if tells_at_once else self._completed.append
        self.clip = self._always_clip
        loss = None
        self.check.begin()
        if self.ticket.size:
            loss = self._compute_into(vector)
        else:
            clear(vector)
            for bucket in self.layout.buckets:
                self._on_bucket(bucket)
        self._clip_own(vector)
        for bucket in self._completed:
            on_bucket(bucket)
        self._completed.clear()
        if self.ticket.size:
            self._conclude(loss)

    def clip_step(self, largest: float) -> None:
        """Clip the gradient of the step that is being computed to this norm.

        Raises:
            UserError: parts of it have been sent already.
        """
        if self._clips == "parts" and self._wait_free:
            raise UserError(
                "training loop: run.clip_grad_norm_() comes too late for this algorithm, which "
                "sends parts of the gradient during backward(); give clip= to DataParallel instead"
            )
        if self._wait_free and not self._holds_back and self._clips == "own":
            raise UserError(
                "training loop: expected run.clip_grad_norm_() in the first step too, or not at "
                "all: parts of this gradient may have been sent already; give wait_free=False"
            )
        self.clip = largest

    def _clip_own(self, vector: Tensor) -> None:
        if self.clip is not None and self._clips == "own":
            clip_norm(vector, self.clip)
        if self._holds_back and self.ticket.size:
            self._wait_free = self._wait_free and self.clip is None
            self._holds_back = False

    def close(self) -> None:
        """The run is over: take the hooks off the model."""
        if self.watch is not None:
            self.watch.close()

    def _compute_into(self, vector: Tensor) -> float | None:
        """Compute; returns the loss. If nothing has been told yet, all of it may be cleared."""
        self._vector = vector
        self.replica.bind_gradients(vector)
        self.replica.keep_buffers()
        start = self.transport.now()
        if self.watch is not None:
            self.watch.start()
        else:
            duration = self.pace.duration()
            start = self._model_forward(start, duration)
        loss = self._compute(self.ticket)
        if isinstance(self.replica, Replica):
            self.replica.settle(is_skipped=loss is SKIPPED)
        if loss is SKIPPED:
            loss = None
        if self.watch is not None:
            self.watch.finish()
            if self.pace.slowdown > 1:
                elapsed = self.transport.now() - start
                self.transport.sleep((self.pace.slowdown - 1) * elapsed)
        else:
            self._model_time(start, duration)
        self.computed += 1
        self.samples += self.ticket.size
        if self._completed and (self._is_too_large(loss) or self.check.verdict()):
            self.check.refuse()
            clear(vector)
        return loss

    def _is_too_large(self, loss: float | None) -> bool:
        return self._max_loss is not None and loss is not None and not loss <= self._max_loss

    def _complete(self, bucket: Bucket) -> None:
        """Backward has completed a bucket: look at it and tell of it."""
        part = self._vector[bucket.part]
        self.check.look(part, bucket.index)
        if self.clip is not None and self._clips == "parts":
            clip_norm(part, self.clip * sqrt(bucket.numel / self.layout.numel))
        self._on_bucket(bucket)

    def _conclude(self, loss: float | None) -> None:
        """The step is computed, and perhaps refused: take note, and tell rank 0 of that."""
        reason, bucket = self.check.verdict() or (None, -1)
        if reason is None and self._is_too_large(loss):
            reason = Reason.LOSS
        refused = reason is not None
        if refused:
            self.refused += 1
            self.replica.restore_buffers()
        elif loss is not None and not isfinite(loss):
            reason = Reason.LOSS_ONLY
        self.in_a_row = self.in_a_row + 1 if refused else 0
        value = nan if loss is None else loss
        if reason is not None:
            where = self.transport.rank, bucket, self.ticket.start
            report(self.transport, Refusal(reason, *where, value, self.in_a_row))
        self._report = Report(self.ticket.size, nan if refused else value)

    def _model_forward(self, start: float, duration: float) -> float:
        """Let the forward pass's time pass, if somebody asks for it; when it began, less waits."""
        if self.before_forward is None:
            return start
        for bucket in reversed(self.layout.buckets):
            self.before_forward(bucket)
            share = bucket.numel / self.layout.numel
            self.transport.sleep(duration * FORWARD_SHARE * share)
        return self.transport.now() - duration * FORWARD_SHARE

    def _model_time(self, start: float, duration: float) -> None:
        """Let the step's time pass; buckets are complete in proportion to backward."""
        for bucket in self.layout.buckets:
            done = bucket.stop / self.layout.numel
            moment = start + duration * (FORWARD_SHARE + (1 - FORWARD_SHARE) * done)
            self.transport.sleep(max(0.0, moment - self.transport.now()))
            self._complete(bucket)

    def resize(self, former: Former) -> None:
        """Begin a period with another number of workers."""
        self.computed = int(former.carried("computed", self.index, self.count))
        self.refused = int(former.carried("refused", self.index, self.count))


def _ignore(bucket: Bucket) -> None:
    """There is nobody to tell."""
