"""What an algorithm's worker stands on: its batches, its gradients, its learning rate."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from math import isfinite, nan

from torch import Tensor

from aladdin_mpi.control.budget import SampleClient, SampleLease, WorkerReport
from aladdin_mpi.control.refusals import GradientCheck, Reason, Refusal, report
from aladdin_mpi.flat.layout import Bucket, Layout
from aladdin_mpi.flat.replica import PhantomReplica, Replica
from aladdin_mpi.flat.state import Stateful, saved
from aladdin_mpi.flat.unused import Unused, UnusedMarks, joined, shifted, within
from aladdin_mpi.flat.vectors import clear, scale
from aladdin_mpi.transport.base import IdleUntil, Transport, survivors_from
from aladdin_mpi.worker.clipping import Clipping, divisor, unscaled
from aladdin_mpi.worker.merged_state import MergedState
from aladdin_mpi.worker.node import NodeLeader
from aladdin_mpi.worker.step import (
    Compute,
    ModelledStep,
    OnBucket,
    Outcome,
    Outcomes,
    RealStep,
    StepTimeModel,
)


class SampleMilestones:
    """All steps of the run's samples before ``samples`` are done.

    For message handlers, where workers go in rounds.
    """

    def __init__(self, transport: Transport) -> None:
        self.samples = 0
        self._transport = transport
        self._is_stepping = False
        self._waiting: list[tuple[int, Callable[[], None]]] = []

    def when(self, samples: int, action: Callable[[], None]) -> None:
        """Call ``action`` when all steps of samples before ``samples`` are done.

        It is called between two steps, as a handler: at the first of these moments, or at once
        if the segment's last step is done.
        """
        if not self._is_stepping and self.samples >= samples:
            action()
        else:
            self._waiting.append((samples, action))

    def advance(self, samples: int, is_stepping: bool) -> None:
        """All steps before ``samples`` are done; the next one follows, or none."""
        with self._transport.atomic():
            self.samples, self._is_stepping = samples, is_stepping
            waiting, self._waiting = self._waiting, []
            for least, action in waiting:
                if samples >= least:
                    action()
                else:
                    self._waiting.append((least, action))


def _unknown(lr: float) -> None:
    """Rank 0 knows the learning rate by itself."""


def _leave(x: Tensor) -> None:
    """Leave the model as it is."""


def _nothing(lease: SampleLease) -> None:
    """Nothing follows a step."""


class Worker(Stateful):
    """One worker's replica and its supply of batches and gradients.

    ``index`` counts the workers from 0, ``count`` is their number and ``servers``
    that of the servers, which are ranks 0 to ``servers`` - 1. Where a node is one worker, all
    that an algorithm sees of it is its leader.

    A gradient that is not finite is refused where it is made, so that no algorithm has to
    know: what is not sound is cleared before anybody is told of it, and everything else
    goes on as with any gradient. Rank 0 is told. ``refused`` counts such steps,
    ``in_a_row`` those at the end of the steps so far.

    Args:
        transport: among the servers and workers of the algorithm.
        compute: see :data:`~aladdin_mpi.worker.step.Compute`.
        pace: with ``seconds``, time is modelled.
        batch_size: samples of one step.
        schedule: learning rate as a function of the samples drawn by all workers.
        clipping: of gradients; its ``wait_free``: tell of a bucket as soon as backward has
            completed it (wait-free backpropagation), not of all of them when backward is over.
        lockstep: batches are parts of rounds that all workers take together.
        max_loss: refuse the gradient of a batch with a larger loss. The loss is known when
            backward is over: so ``clipping`` must not be wait-free.
        rate: of the schedule's learning rate makes the one of the present step, where rank 0
            does not know it.
        after_step: called with a batch when the algorithm has done all that it asks for.
        on_empty: called with a lease without samples for this worker. Others may have some, and
            be ahead of what this worker's user has to meet them at.
        whole: the transport among all ranks, where that is another one.
        node: the other workers of this node, which this one leads.
        draws: where the samples come from; None: from rank 0.
        marks_unused: whether others have to know which parameters a gradient does not reach.
        steps_unused: whether the algorithm steps parameters that a batch does not use; the first
            time is reported to rank 0.
        project: changes a flat model after a step, as the script asks.
        lr_scale: what the learning rate is multiplied by for a number of workers.
    """

    SAVED = saved("samples", "computed", "refused", "in_a_row", pace="_pace.random")

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        replica: Replica | PhantomReplica,
        compute: Compute,
        pace: StepTimeModel,
        batch_size: int,
        schedule: Callable[[int], float],
        clipping: Clipping,
        lockstep: bool = False,
        max_loss: float | None = None,
        rate: Callable[[float], float | None] = _unknown,
        after_step: Callable[[SampleLease], None] = _nothing,
        on_empty: Callable[[SampleLease], None] = _nothing,
        whole: Transport | None = None,
        node: NodeLeader | None = None,
        draws: SampleClient | None = None,
        marks_unused: bool = False,
        steps_unused: bool = False,
        project: Callable[[Tensor], None] = _leave,
        lr_scale: Callable[[int], float] = unscaled,
    ) -> None:
        self.transport = transport
        self.whole = whole or transport
        self.layout = layout
        self.replica = replica
        self.parameters: Tensor = replica.parameters
        self.servers = layout.servers
        self.index = transport.rank - layout.servers
        self.count = transport.size - layout.servers
        self.lease = self.part = SampleLease(0, 0, 0)
        """The present step's, and this rank's part of it, which is all but where it leads a node.
        """
        self.samples = 0
        self.computed = 0
        self.refused = 0
        self.in_a_row = 0
        self.loss_scale = 1.0
        """What the loss of the present step has been multiplied by."""
        self.reached = SampleMilestones(transport)
        self.check = GradientCheck()
        self.clipping = clipping
        self._pace = pace
        self._batch_size = batch_size
        self._schedule = schedule
        self._node = node
        self._rated: SampleLease | None = None
        self._lr = 0.0
        self._draws = draws or SampleClient(self.whole)
        self._outcomes = Outcomes(self.whole, replica.parameters.device)
        self._reports: deque[WorkerReport] = deque()
        self._on_loss: list[Callable[[float], None]] = []
        self._max_loss = max_loss
        self._lockstep = lockstep
        self._rate = rate
        self._after_step = after_step
        self._on_empty = on_empty
        self._vector = replica.parameters
        self._completed: list[Bucket] = []
        self._on_bucket: OnBucket = _ignore
        self._marks = UnusedMarks(replica.sizes, layout)
        self._unused: list[slice] = []
        self._batch_unused: Set[int] = frozenset()
        """The parameters that the last batch did not use."""
        self._marks_unused = marks_unused
        self._warns_unused = steps_unused
        self.project = project
        self._lr_scale = lr_scale
        self.step = self._make_step(compute, pace)

    def _make_step(self, compute: Compute, pace: StepTimeModel) -> RealStep | ModelledStep:
        transport, layout, replica = self.transport, self.layout, self.replica
        if pace.seconds is not None:
            return ModelledStep(
                transport, layout, replica, compute, pace.seconds, pace, self._complete
            )
        assert isinstance(replica, Replica)
        wait_free = self.clipping.is_wait_free
        return RealStep(transport, layout, replica, compute, pace, self._complete, wait_free)

    @property
    def lr(self) -> float:
        """Learning rate of the current batch."""
        if self._rated is not self.lease:  # it is asked for with every bucket
            self._rated, self._lr = self.lease, self._schedule(self.lease.start)
        return self._lr

    def on_loss(self, action: Callable[[float], None]) -> None:
        """Have ``action`` called with the finite loss of each step whose gradient is sound.

        Where a device computes, that is a step late; :meth:`settle` waits for it.
        """
        self._on_loss.append(action)

    @property
    def share(self) -> float:
        """What the current batch's mean gradient weighs in the mean over all workers.

        It is 1 where every worker has as many samples; the mean of gradients times
        shares is that of all samples of the round.
        """
        if not self._lockstep:
            return 1.0
        return self.lease.size * (self.count - len(self.lease.absent)) / self.lease.whole

    @property
    def survivors(self) -> int:
        """The number of workers, this one included, that are not known to have failed."""
        return survivors_from(self.transport, self.servers)

    @property
    def divisor(self) -> float:
        """What gradients are divided by: see :func:`~aladdin_mpi.worker.clipping.divisor`."""
        return divisor(self.count, self.survivors, self._lr_scale)

    def shares_of(self, ranks: Sequence[int]) -> float:
        """Return the sum of the shares of ``ranks`` in the current round.

        The sum of their gradients times shares, divided by it, is the mean over their samples. It
        is their number, unless a worker has failed that was to have more or fewer samples than
        others. Without samples it is 1: their gradients are zero.
        """
        lease, everyone = self.lease, range(self.servers, self.transport.size)
        dealt = [rank for rank in everyone if rank not in lease.absent]
        samples = sum(
            lease.size_of(place, len(dealt)) for place, rank in enumerate(dealt) if rank in ranks
        )
        return samples * len(dealt) / lease.whole or 1.0

    # -- batches ------------------------------------------------------------------------
    def batches(self) -> Iterator[SampleLease]:
        """This worker's batches until the segment's samples are used up.

        The next one is drawn while the current one is computed, or several where the
        network is slow, so that drawing costs no waiting.
        """
        draws, end = self._draws, self.reached.samples
        node, size = self._node, self._batch_size
        draws.open()
        if node is not None:
            size *= node.size
            node.open()
        draws.request(size, self._take_report())
        has_ended = False
        while draws.outstanding:
            self.lease = draws.take()
            self.part = self.lease if node is None else node.deal(self.lease)
            if self.part.size == 0 and not has_ended:
                self._on_empty(self.part)
            has_ended = self.lease.whole == 0
            if has_ended:
                continue  # so are those asked for after it
            for _ in range(draws.short):
                draws.request(size, self._take_report())
            self.reached.advance(self.lease.start, is_stepping=True)
            yield self.lease
            self._after_step(self.lease)
            end = self.lease.start + self.lease.whole
        self.settle()
        self.reached.advance(end, is_stepping=False)
        draws.report(self._take_report())
        while self._reports:
            draws.report(self._take_report())

    def _take_report(self) -> WorkerReport:
        """The oldest that has not been sent."""
        traffic = self.transport.traffic
        report = self._reports.popleft() if self._reports else WorkerReport()
        return WorkerReport(
            report.samples,
            report.loss,
            traffic.waiting,
            traffic.bytes_sent,
            self.computed,
            self._rate(self.lr),
        )

    def stop(self) -> None:
        """Ask for the end of the run."""
        self._draws.stop()

    def close_run(self) -> None:
        """Ask for the end of the run, without its results."""
        self._draws.close_run()

    def pass_over(self, samples: int) -> None:
        """Ask that no samples of the run before number ``samples`` are granted any more."""
        self._draws.pass_over(samples)

    # -- gradients ----------------------------------------------------------------------
    def scale_loss(self, loss: Tensor) -> Tensor:
        """The present step's loss, to be differentiated in half precision.

        Of the gradients that come from it the scale is taken off again.
        """
        self.loss_scale = self.lease.scale
        return loss * self.loss_scale

    def gradient(
        self,
        vector: Tensor,
        on_bucket: OnBucket | None = None,
        idle_until: IdleUntil | None = None,
    ) -> None:
        """Compute the current batch's gradient into the flat ``vector``, whatever it holds.

        ``on_bucket`` is called for every bucket, in order, as soon as it is complete:
        during backward, or spread over the modelled one; None: nobody asks. It need not be
        called while it would do nothing by ``idle_until`` (see :meth:`Transport.sleep_between`),
        where nothing is calculated. Without samples in the round the gradient is zero and takes no
        time. Of one that is refused at least the bucket that is not finite, and those after it, are
        zero.
        """
        on_bucket = on_bucket or _ignore
        self._on_bucket = on_bucket if self.clipping.tells_at_once else self._completed.append
        self.step.idle_until = self._idleness(vector, on_bucket, idle_until)
        self.clipping.begin()
        self.check.begin()
        self.loss_scale = 1.0
        self._vector = vector
        self._unused = []
        if self._node is not None:
            self._node.begin(vector)
        loss = None
        if self.part.size:
            loss = self._compute_into(vector)
        else:
            self._leave_out(vector)
        self.clipping.end(vector, is_computed=self.lease.size > 0)
        for bucket in self._completed:
            on_bucket(bucket)
        self._completed.clear()
        if self.part.size:
            self._batch_unused = self.replica.unused
            self._outcomes.note(self.part._replace(scale=self.loss_scale), loss, self.check)
            self.settle(self._outcomes.lag)

    def unused(self, part: slice) -> Unused:
        """Return the parts of ``part``, relative to its start, that have no gradient.

        These are the parameters that the present step's batch did not use, which are not to be
        stepped. Those of a bucket are known when ``on_bucket`` is called for it. For a sum over
        workers see :meth:`unused_by_all`.
        """
        return within(part, self._unused) if self._unused else ()

    def unused_by_all(self, bucket: Bucket, total: Tensor) -> Unused:
        """Return the parts of a bucket of a sum of gradients that no worker has a gradient for.

        Nothing has to be read, which on a device would wait for the sum, unless this worker has
        none for some parameter itself.
        """
        return self._marks.read(bucket, total, self.replica.unused)

    def _leave_out(self, vector: Tensor) -> None:
        """There are no samples for this worker: a sum over workers gets nothing from it.

        A step of its own is one along a gradient of zero, so that workers that average their
        models remain equal to one process; it leaves alone what the last batch did not use.
        """
        clear(vector)
        self.replica.use_none()
        for bucket in self.layout.buckets:
            self._mark(bucket)
            for each in self._summed(bucket):
                self._note_unused(each, self._batch_unused)
                self._on_bucket(each)

    def _mark(self, bucket: Bucket) -> None:
        if self._marks_unused and not self._vector.is_meta:
            self._marks.write(bucket, bucket.of(self._vector), self.replica.unused)

    def _note_unused(self, bucket: Bucket, unused: Set[int]) -> None:
        """Take note of what a bucket, summed over the node, has no gradient for."""
        if not unused or self._vector.is_meta:
            return
        if self._warns_unused and self.part.size:
            self._warns_unused = False
            report(self.whole, Refusal(Reason.UNUSED, self.whole.rank, sample=self.lease.start))
        if self._node is None:
            found = self._marks.parts(bucket, unused)
        else:
            found = self._marks.read(bucket, bucket.of(self._vector), unused)
        self._unused = joined([*self._unused, *shifted(found, bucket.start)])

    def _compute_into(self, vector: Tensor) -> float | Tensor | None:
        """Compute; returns the loss. If nothing has been told yet, all of it may be cleared."""
        loss = self.step.compute_into(vector, self.part)
        self.computed += 1
        self.samples += self.part.size
        if self._completed:
            if self._is_too_large(loss):
                self.check.refuse()
                clear(vector)
            self.check.clear_unsound(vector)
        return loss

    def _idleness(
        self, vector: Tensor, on_bucket: OnBucket, idle_until: IdleUntil | None
    ) -> IdleUntil | None:
        """What says how long :meth:`_complete` would have no effect; None: it always has."""
        if self._node is not None or not vector.is_meta or not self.clipping.tells_at_once:
            return None
        return _for_ever if on_bucket is _ignore else idle_until

    def _complete(self, bucket: Bucket) -> None:
        """Backward has completed a bucket."""
        if self.loss_scale != 1.0:
            scale(bucket.of(self._vector), 1 / self.loss_scale)
        self._mark(bucket)
        for each in self._summed(bucket):
            self._tell(each)

    def _summed(self, bucket: Bucket) -> Iterable[Bucket]:
        """With this one of this worker: the buckets that are complete on the node."""
        return (bucket,) if self._node is None else self._node.complete(bucket)

    def _tell(self, bucket: Bucket) -> None:
        """A bucket's gradient is there: look at it and tell of it."""
        if not self._vector.is_meta:
            self._note_unused(bucket, self.replica.unused)
            part = bucket.of(self._vector)
            self.check.look(part, bucket.index)
            self.clipping.clip_part(part, bucket.numel / self.layout.numel)
        self._on_bucket(bucket)

    def _is_too_large(self, loss: float | Tensor | None) -> bool:
        """Waits for the device that computes the loss, if there is a largest one."""
        return self._max_loss is not None and loss is not None and not loss <= self._max_loss

    def settle(self, lag: int = 0) -> None:
        """Take note of what the steps have come to, but for the newest ``lag``."""
        for outcome in self._outcomes.read(lag):
            self._judge(outcome)

    def _judge(self, outcome: Outcome) -> None:
        """A step is computed, and perhaps refused: take note, and tell rank 0 of that."""
        lease, loss, found = outcome
        reason, bucket = found or (None, -1)
        was_scaled = reason is not None and lease.scale != 1.0
        if was_scaled:
            reason = Reason.SCALE
        if reason is None and self._is_too_large(loss):
            reason = Reason.LOSS
        refused = reason is not None
        if refused:
            self.refused += 1
            self.replica.restore_buffers(len(self._outcomes))
        elif loss is not None and not isfinite(loss):
            reason = Reason.LOSS_ONLY
        elif loss is not None:
            for action in self._on_loss:
                action(loss)
        if not was_scaled:  # a smaller scale is tried first
            self.in_a_row = self.in_a_row + 1 if refused else 0
        value = nan if loss is None else loss
        if reason is not None:
            where = self.whole.rank, bucket, lease.start
            report(self.whole, Refusal(reason, *where, value, self.in_a_row))
        self._reports.append(WorkerReport(lease.size, nan if refused else value))

    def close(self) -> None:
        """The run is over: take the hooks off the model."""
        self.step.close()

    def resize(self, merged: MergedState) -> None:
        """Begin a period with another number of workers."""
        self.computed = int(merged.carried("computed", self.index, self.count))
        self.refused = int(merged.carried("refused", self.index, self.count))


def _ignore(bucket: Bucket) -> None:
    """There is nobody to tell."""


def _for_ever() -> tuple[()]:
    """There is never anything to be done."""
    return ()
