"""What an algorithm's worker stands on: its batches, its gradients, its learning rate."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from aladdin_mpi.budget import Draws, Report, Ticket
from aladdin_mpi.layout import Bucket, Layout
from aladdin_mpi.replica import BucketWatch, PhantomReplica, Replica
from aladdin_mpi.transport.base import Transport

FORWARD_SHARE = 1 / 3
"""Share of a step's computing that is the forward pass, in modelled time."""

OnBucket = Callable[[Bucket], None]


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


class Worker:
    """One worker's replica and its supply of batches and gradients.

    ``index`` counts the workers from 0, ``count`` is their number and ``servers``
    that of the servers, which are ranks 0 to ``servers`` - 1.

    Args:
        compute: does forward and backward of the current batch into the bound
            gradients and returns the loss.
        batch_size: samples of one step.
        schedule: learning rate as a function of the samples drawn by all workers.
        wait_free: tell of a bucket as soon as backward has completed it (wait-free
            backpropagation); otherwise of all of them when backward is over.
        lockstep: batches are parts of rounds that all workers take together.
    """

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        replica: Replica | PhantomReplica,
        compute: Callable[[Ticket], float],
        pace: Pace,
        batch_size: int,
        schedule: Callable[[int], float],
        wait_free: bool = True,
        lockstep: bool = False,
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
        self._compute = compute
        self._batch_size = batch_size
        self._schedule = schedule
        self._draws = Draws(transport)
        self._report = Report()
        self._wait_free = wait_free
        self._lockstep = lockstep
        self._completed: list[Bucket] = []
        self._on_bucket: OnBucket = _ignore
        self.before_forward: OnBucket | None = None
        """In modelled time, called for every bucket, last first, when the forward pass comes
        to it; it may wait. Real gradients are then computed between the forward pass, which
        is modelled first, and the backward pass."""
        self.watch: BucketWatch | None = None
        if pace.seconds is None:
            assert isinstance(replica, Replica)
            self.watch = replica.watch(layout, lambda index: self._tell(layout.buckets[index]))

    @property
    def lr(self) -> float:
        """Learning rate of the current batch."""
        return self._schedule(self.ticket.start)

    @property
    def loss(self) -> float:
        """Loss of the step just computed; not a number with timed computing."""
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
        draws = self._draws
        draws.open()
        draws.request(self._batch_size, self._take_report())
        while draws.outstanding:
            self.ticket = draws.take()
            if self.ticket.whole == 0:
                continue  # so are those asked for after it
            for _ in range(draws.short):
                draws.request(self._batch_size, self._take_report())
            yield self.ticket
        draws.report(self._take_report())

    def _take_report(self) -> Report:
        traffic = self.transport.traffic
        report = self._report._replace(
            waiting=traffic.waiting, sent=traffic.bytes_sent, steps=self.computed
        )
        self._report = Report()
        return report

    def stop(self) -> None:
        """Ask for the end of the run."""
        self._draws.stop()

    def gradient(self, vector: Tensor, on_bucket: OnBucket | None = None) -> None:
        """Compute the current batch's gradient into the zeroed flat ``vector``.

        ``on_bucket`` is called for every bucket, in order, as soon as it is complete:
        during backward, or spread over the modelled one; None: nobody asks. Without
        samples in the round the gradient is zero and takes no time.
        """
        on_bucket = on_bucket or _ignore
        self._on_bucket = on_bucket if self._wait_free else self._completed.append
        if self.ticket.size:
            self._compute_into(vector)
        else:
            for bucket in self.layout.buckets:
                self._tell(bucket)
        for bucket in self._completed:
            on_bucket(bucket)
        self._completed.clear()

    def _compute_into(self, vector: Tensor) -> None:
        self.replica.bind_gradients(vector)
        start = self.transport.now()
        if self.watch is not None:
            self.watch.start()
        else:
            duration = self.pace.duration()
            start = self._model_forward(start, duration)
        loss = self._compute(self.ticket)
        if isinstance(self.replica, Replica):
            self.replica.check_bound()
        if self.watch is not None:
            self.watch.finish()
            if self.pace.slowdown > 1:
                elapsed = self.transport.now() - start
                self.transport.sleep((self.pace.slowdown - 1) * elapsed)
        else:
            self._model_time(start, duration)
        self.computed += 1
        self.samples += self.ticket.size
        self._report = Report(samples=self.ticket.size, loss=loss)

    def _tell(self, bucket: Bucket) -> None:
        self._on_bucket(bucket)

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
            self._tell(bucket)

    def state_dict(self) -> dict[str, object]:
        """Counters and random state, for a checkpoint between segments."""
        return {
            "samples": self.samples,
            "computed": self.computed,
            "pace": self.pace.random.getstate(),
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Take up a state from :meth:`state_dict`."""
        self.samples = int(str(state["samples"]))
        self.computed = int(str(state["computed"]))
        pace = state["pace"]
        assert isinstance(pace, tuple)
        self.pace.random.setstate(pace)


def _ignore(bucket: Bucket) -> None:
    """There is nobody to tell."""
