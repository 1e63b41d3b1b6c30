"""One step's gradient, from backward to the wire: computed, checked, clipped and sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from aladdin_mpi.accelerator import CopyStream, Stopwatch, is_accelerator
from aladdin_mpi.control.budget import SampleLease
from aladdin_mpi.control.refusals import Reason, Refusal, report
from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.gradients import BucketWatch, OnBucket
from aladdin_mpi.flat.layout import Bucket, Layout
from aladdin_mpi.flat.replica import PhantomReplica, Replica
from aladdin_mpi.flat.unused import UnusedMarks, joined, shifted
from aladdin_mpi.flat.vectors import clear, clip_norm, is_finite, scale, total
from aladdin_mpi.options.algorithms import Clips
from aladdin_mpi.transport.base import Event, IdleUntil, Transport, await_event
from aladdin_mpi.worker.island import Island, ReplicatedIsland
from aladdin_mpi.worker.step import Compute, Loss, ModelledStep, Skip


# -- backward -------------------------------------------------------------------------------------
class RealStep:
    """A step in real time, whose buckets autograd completes.

    Args:
        slowdown: factor on the step's duration, simulated by sleeping.
        wait_free: report buckets during backward instead of at its end.
    """

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        replica: Replica,
        compute: Compute,
        slowdown: float,
        wait_free: bool,
    ) -> None:
        self._transport = transport
        self._replica = replica
        self._compute = compute
        self._slowdown = slowdown
        self._stopwatch = Stopwatch(replica.parameters.device)
        self._last: float | None = None
        """Duration of the last step's computation, in seconds."""
        self.watch: BucketWatch | None = replica.watch(layout, wait_free)

    def compute_into(
        self,
        vector: Tensor,
        batch: SampleLease,
        on_bucket: OnBucket,
        idle_until: IdleUntil | None = None,
        before_forward: OnBucket | None = None,
    ) -> Loss:
        """Compute the batch's gradient into the flat ``vector``; return the loss."""
        assert self.watch is not None
        self._replica.bind_gradients(vector)
        self._replica.keep_buffers()
        # A slow worker sends its gradient at the end of its step, so the gradient is as old as the
        # step is long. It sleeps before computing, based on the last step; in the first, after it.
        is_first = self._last is None
        if self._slowdown > 1 and self._last is not None:
            self._transport.sleep((self._slowdown - 1) * self._last)
        start = self._transport.now()
        self.watch.begin(on_bucket)
        loss = self._compute(batch)
        is_skipped = isinstance(loss, Skip)
        self._replica.end_backward(is_skipped)
        self.watch.end()
        if self._slowdown > 1:
            self._stopwatch.finish()
        self._last = self._transport.now() - start
        if self._slowdown > 1 and is_first:
            self._transport.sleep((self._slowdown - 1) * self._last)
        return loss

    def close(self) -> None:
        """Remove the hooks from the model."""
        if self.watch is not None:
            self.watch.close()


# -- values that are not finite -------------------------------------------------------------------
Finding = tuple[Reason, int]
"""The reason to refuse a gradient, and the first affected bucket."""


class GradientCheck:
    """Check of a gradient, bucket by bucket, which zeroes values that are not finite.

    From the first bucket that is not finite on, the rest of the gradient is zeroed too; earlier
    buckets may have been sent, and are finite. On a CPU the check is one sum over values that
    backward has just written. On a GPU nothing waits: zeroing depends on sums on the device, and
    the finding is known once these have been copied to the host (:func:`finding_in`).

    Attributes:
        finding: the finding on the host.
        sums: on a GPU, the running sum after each of ``buckets``.

    The check costs half as much as adding two gradients: on one core of a server, 0.2 ms for a
    bucket of 4 MB, and 0.02 ms for all of ResNet-20 (270,000 values, which stay cached).
    """

    def __init__(self) -> None:
        self.finding: Finding | None = None
        self._refused = False
        self.buckets: list[int] = []
        self.sums: list[Tensor] = []

    def refuse(self) -> None:
        """Zero all further buckets."""
        self._refused = True

    @property
    def may_have_zeroed(self) -> bool:
        """Whether values have been zeroed; on a GPU, whether they may have been."""
        return self._refused or bool(self.sums)

    def look(self, values: Tensor, bucket: int) -> None:
        """Check the message about ``bucket``; zero it in place if it is not finite."""
        if values.is_meta:
            return
        if not values.is_cpu:
            self._add_to_sums(values, bucket)
        elif not (self._refused or is_finite(values)):
            self._refused = True
            self.finding = _kind(values.isnan().any().item()), bucket
        if self._refused:
            values.zero_()

    def _add_to_sums(self, values: Tensor, bucket: int) -> None:
        """Add to the running sum, which stays non-finite once it is."""
        bucket_sum = total(values)
        self.sums.append(self.sums[-1] + bucket_sum if self.sums else bucket_sum)
        self.buckets.append(bucket)
        self.clear_if_refused(values)

    def clear_if_refused(self, values: Tensor) -> None:
        """Zero ``values`` if any checked value is not finite; on a GPU without waiting for it."""
        if self.sums:
            values.masked_fill_(~self.sums[-1].isfinite(), 0.0)
        elif self.finding:
            clear(values)


def finding_in(sums: Sequence[float], buckets: Sequence[int]) -> Finding | None:
    """Return the finding from a GPU's sums, once they are on the host."""
    for running, bucket in zip(sums, buckets, strict=True):
        if not isfinite(running):
            return _kind(running != running), bucket
    return None


def _kind(is_nan: object) -> Reason:
    return Reason.NAN if is_nan else Reason.INFINITE


# -- clipping -------------------------------------------------------------------------------------
class Clipping:
    """A bound on gradients' norms; decides whether buckets may be sent before it is verified.

    Args:
        norm: largest L2 norm of a gradient; None: no limit.
        kind: the clipped gradient: a worker's ``own``, whose norm is known after backward; its
            ``parts``, where each bucket is limited to its share and can be sent at once; or
            the ``mean`` of all workers', clipped by the algorithm.
        per_step: whether a step may request clipping during its computation
            (:meth:`check_step`): no bucket is sent early in the first step, nor in later ones
            if that one is clipped.
        wait_free: nothing else prevents buckets from being sent early.
    """

    def __init__(
        self,
        norm: float | None = None,
        kind: Clips = "own",
        per_step: bool = False,
        wait_free: bool = True,
    ) -> None:
        if kind == "parts" and norm is None:
            kind = "own"  # only a step may request clipping, when its gradient is complete
        self.norm = norm
        self.kind = kind
        self.is_wait_free = wait_free and not (kind == "own" and norm is not None)
        self.per_step = per_step
        self.recent = norm
        """Norm to which the last step of the training loop was clipped."""
        self._awaits_first = per_step and kind == "own"

    @property
    def tells_at_once(self) -> bool:
        """Whether a bucket may be sent as soon as it is complete."""
        return self.is_wait_free and not self._awaits_first

    def check_step(self) -> None:
        """Check that the gradient of the current step can still be clipped.

        Raises:
            UserError: parts of it have been sent already.
        """
        if self.kind == "parts" and self.is_wait_free:
            raise UserError(
                "training loop: run.clip_grad_norm_() comes too late, because clip= lets this "
                "algorithm send parts of the gradient during backward(). Leave one of the two out."
            )
        if self.kind == "own" and self.tells_at_once:
            raise UserError(
                "training loop: run.clip_grad_norm_() was not called in the first step, so parts "
                "of this gradient may have been sent already. Call it in every step, or pass "
                "clip= or wait_free=False."
            )

    def note_step(self, norm: float | None) -> None:
        """Record the norm of a computed step; the first one decides for all later ones."""
        self.recent = norm
        if self._awaits_first:
            self.is_wait_free = self.is_wait_free and norm is None
            self._awaits_first = False


# -- the gradient of one step ---------------------------------------------------------------------
@dataclass
class GradientStages:
    """The stages that every gradient of a worker passes through, shared by all steps.

    Args:
        transport: transport among all ranks, for reports to rank 0.
        layout: of the vector in which ``replica``, the whole model, has its gradient.
        step: computes the gradient.
        island: the ranks that make each step together; None: this worker is alone.
        marks: marks of unused parameters in the algorithm's vectors.
        writes_marks: whether other ranks have to know the unused parameters.
        reports_unused: whether the first unused parameter is still to be reported to rank 0.
        max_loss: gradients of a larger loss are refused; None: no limit.
    """

    transport: Transport
    layout: Layout
    replica: Replica | PhantomReplica
    step: RealStep | ModelledStep
    clipping: Clipping
    island: Island | None
    marks: UnusedMarks
    writes_marks: bool
    reports_unused: bool
    max_loss: float | None

    @property
    def adder(self) -> ReplicatedIsland | None:
        """The island, if it adds up its members' gradients here; FSDP does so during backward."""
        return self.island if isinstance(self.island, ReplicatedIsland) else None

    def is_too_large(self, loss: float | Tensor | None) -> bool:
        """Return whether a loss exceeds the limit; if one is set, wait for the loss."""
        return self.max_loss is not None and loss is not None and not loss <= self.max_loss


class GradientPass:
    """One step's gradient, from backward to the wire.

    The methods are in the order in which a gradient passes through them. :meth:`compute` runs
    forward and backward, which call :meth:`_complete` for each bucket to hand it over;
    :meth:`finish` hands over the buckets that had to wait for the end of backward.

    Args:
        lease: samples of the step.
        part: this rank's part of them: all, unless it is in an island.
        vector: the algorithm's flat gradient; its contents are overwritten.
        on_bucket: called with every bucket, in order, when it is final; None: not called.
        idle_until: see :meth:`Transport.sleep_between`.
        before_forward: see :meth:`ModelledStep.compute_into`.

    Attributes:
        loss_scale: factor that the script has applied to the loss.
        norm: largest norm of the gradient; None: no limit.
        unused: parts of the vector without a gradient, in the buckets handed over so far.
        loss: loss of the batch, once computed.
    """

    def __init__(
        self,
        stages: GradientStages,
        lease: SampleLease,
        part: SampleLease,
        vector: Tensor,
        on_bucket: OnBucket | None = None,
        idle_until: IdleUntil | None = None,
        before_forward: OnBucket | None = None,
    ) -> None:
        clipping = stages.clipping
        self._before_forward = before_forward
        self._stages = stages
        self._is_real = not vector.is_meta
        self._computed = vector
        """The whole gradient of this rank's part, from which ``vector`` is made."""
        self._held_back: list[Bucket] = []
        self._local: list[Bucket] = []
        """Held back before the island adds them, as the training loop may still change them."""
        self._is_held_back = not clipping.tells_at_once
        self._on_bucket = on_bucket or _ignore
        self._hand_over = self._held_back.append if self._is_held_back else self._on_bucket
        self._idle_until = _no_requests if on_bucket is None else idle_until
        self._part_norm = clipping.kind == "parts"
        self.lease = lease
        self.part = part
        self.vector = vector
        self.loss_scale = 1.0
        self.norm = clipping.norm
        self.check = GradientCheck()
        self.unused: list[slice] = []
        self.loss: float | Tensor | None = None
        self._is_computed = False

    # -- called by the training loop, before or during backward ----------------------------------
    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the scaled loss for half precision; the scale is removed from gradients."""
        self.loss_scale = self.lease.scale
        return loss * self.loss_scale

    def clip_to(self, norm: float) -> None:
        """Clip this gradient to ``norm``.

        Raises:
            UserError: parts of it have been sent already.
        """
        self._stages.clipping.check_step()
        self.norm = norm

    # -- backward -------------------------------------------------------------------------------
    def compute(self) -> None:
        """Compute the batch's loss and gradient."""
        stages, vector = self._stages, self.vector
        if stages.island is not None:
            self._computed = stages.island.begin(vector)
        loss = stages.step.compute_into(
            self._computed,
            self.part,
            self._complete,
            None if self._is_real else self._idle_condition(),
            self._before_forward,
        )
        self._is_computed = not isinstance(loss, Skip)
        self.loss = None if isinstance(loss, Skip) else loss
        if self._is_held_back:  # so the whole gradient can still be zeroed
            if stages.is_too_large(self.loss):
                self.check.refuse()
                clear(self._computed)
            self.check.clear_if_refused(self._computed)
            if self.check.may_have_zeroed:  # marks too, which are values
                for bucket in stages.layout.buckets:
                    self._mark(bucket)
        for bucket in self._local:
            self._pass_on(bucket)

    def _idle_condition(self) -> IdleUntil | None:
        """Return when :meth:`_complete` is next needed; None: it always has an effect."""
        has_effect = self._stages.island is not None or self._is_held_back
        return None if has_effect else self._idle_until

    def leave_out(self, unused: Set[int], before: Callable[[], None] = lambda: None) -> None:
        """Hand over a gradient of zero, as this worker has no samples.

        It does not change a sum over workers. As a local step it is one along a gradient of zero,
        so that workers that average their models remain equivalent to one process; parameters that
        the last batch did not use are not stepped.

        Args:
            unused: the parameters that may have no gradient.
            before: called before anything is handed over.
        """
        stages = self._stages
        if stages.island is not None:
            self._computed = stages.island.begin(self.vector)
        before()
        clear(self._computed)
        stages.replica.use_none()
        for bucket in stages.layout.buckets:
            self._mark(bucket)
            for each in self._summed(bucket):
                if unused and self._is_real:
                    self._note_unused(each, unused)
                self._hand_over(each)

    # -- each bucket ------------------------------------------------------------------------------
    def _complete(self, bucket: Bucket) -> None:
        """Unscale and check a completed bucket, and pass it on."""
        stages, values = self._stages, bucket.of(self._computed)
        if self.loss_scale != 1.0:
            scale(values, 1 / self.loss_scale)
        if self._is_real:
            self.check.look(values, bucket.index)
        self._mark(bucket)
        if stages.adder is not None and self._is_held_back:
            self._local.append(bucket)
        else:
            self._pass_on(bucket)

    def _pass_on(self, bucket: Bucket) -> None:
        """Sum a bucket over the island, clip it, and hand it over."""
        stages = self._stages
        for each in self._summed(bucket):
            if self._is_real:
                unused = stages.replica.unused
                if unused:
                    self._note_unused(each, unused)
                if self._part_norm and self.norm is not None:
                    share = each.numel / stages.replica.numel
                    clip_norm(each.of(self.vector), self.norm * sqrt(share))
            self._hand_over(each)

    def _mark(self, bucket: Bucket) -> None:
        """Mark the parameters in a bucket that this rank's gradient does not reach."""
        stages = self._stages
        if not (stages.writes_marks and self._is_real):
            return
        if stages.adder is None:
            stages.marks.write(bucket, bucket.of(self.vector), stages.replica.unused)
        else:
            stages.adder.mark(bucket, stages.replica.unused)

    def _summed(self, bucket: Bucket) -> Sequence[Bucket] | Iterator[Bucket]:
        """Return the algorithm's buckets that are complete on the whole island."""
        adder = self._stages.adder
        return (bucket,) if adder is None else adder.add(bucket)

    def _note_unused(self, bucket: Bucket, unused: Set[int]) -> None:
        """Record the parts of a bucket, summed over the island, that have no gradient."""
        stages = self._stages
        if stages.reports_unused and self.part.size:
            stages.reports_unused = False
            rank, start = stages.transport.rank, self.lease.start
            report(stages.transport, Refusal(Reason.UNUSED, rank, sample=start))
        if stages.adder is None:
            parts = stages.marks.parts(bucket, unused)
        else:
            parts = stages.marks.read(bucket, bucket.of(self.vector), unused)
        self.unused = joined([*self.unused, *shifted(parts, bucket.start)])

    # -- after backward ---------------------------------------------------------------------------
    def finish(self) -> None:
        """Clip the gradient as a whole, and hand over the buckets that were held back.

        Without a batch, the training loop has not requested clipping, but other workers' loops may
        have: the norm of this worker's last batch applies.
        """
        clipping, island = self._stages.clipping, self._stages.island
        norm = self.norm if self._is_computed else clipping.recent
        self.norm = norm
        if island is not None and clipping.per_step:
            self.norm = island.smallest(norm)
        if self.norm is not None and clipping.kind == "own":
            self.clip(self.vector, self.norm)
        if self._is_computed:
            clipping.note_step(norm)
        for bucket in self._held_back:
            self._on_bucket(bucket)

    def clip(self, vector: Tensor, norm: float) -> None:
        """Limit the norm of a gradient or sum, of which an island's members have a lane each."""
        island = self._stages.island
        if island is None:
            clip_norm(vector, norm)
        else:
            island.clip_norm(vector, norm)


def _ignore(bucket: Bucket) -> None:
    """Do nothing (default callback)."""


def _no_requests() -> tuple[()]:
    """Return no requests: nothing has to be done before the end."""
    return ()


# -- outcomes ---------------------------------------------------------------------------------
class Outcome(NamedTuple):
    """The outcome of a step of ``lease``; ``finding`` is the reason to refuse its gradient."""

    lease: SampleLease
    loss: float | None
    finding: Finding | None
    ends_batch: bool


class _InTransit(NamedTuple):
    """Numbers being copied from a device: sums of buckets, then the loss if it is there."""

    numbers: Tensor
    event: Event
    buckets: list[int]

    def read(self, outcome: Outcome) -> Outcome:
        sums, count = self.numbers.tolist(), len(self.buckets)
        loss = sums[count] if len(sums) > count else outcome.loss
        finding = outcome.finding or finding_in(sums[:count], self.buckets)
        return outcome._replace(loss=loss, finding=finding)


class Outcomes:
    """The outcomes of a worker's steps, in order.

    Args:
        device: device that computes the steps.
    """

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self._transport = transport
        self._copies = CopyStream(device) if is_accelerator(device) else None
        self._unread: deque[tuple[Outcome, _InTransit | None]] = deque()
        self.lag = 0 if self._copies is None else 1
        """Number of steps whose outcome may be in transit when the next step has been started."""

    def __len__(self) -> int:
        """Return the number of unread outcomes."""
        return len(self._unread)

    def note(self, step: GradientPass, ends_batch: bool) -> None:
        """Record a step that has been computed, or submitted to the device.

        ``ends_batch``: it is the last one of its batch.
        """
        loss, check = step.loss, step.check
        numbers = list(check.sums)
        known: float | None = None
        if not isinstance(loss, torch.Tensor):
            known = loss
        elif self._copies is None:
            known = loss.item()  # on another device than the model
        else:
            numbers.append(loss)
        transit = self._send(numbers, check.buckets) if numbers else None
        lease = step.part._replace(scale=step.loss_scale)
        self._unread.append((Outcome(lease, known, check.finding, ends_batch), transit))

    def _send(self, numbers: list[Tensor], buckets: list[int]) -> _InTransit:
        assert self._copies is not None
        stacked = torch.stack([each.detach().float().reshape(()) for each in numbers])
        target = torch.empty(len(numbers), pin_memory=True)
        return _InTransit(target, self._copies.copy(stacked, target), buckets)

    def read(self, lag: int = 0) -> Iterator[Outcome]:
        """Iterate over all but the newest ``lag``, oldest first; wait for those in transit."""
        while len(self._unread) > lag:
            outcome, transit = self._unread.popleft()
            if transit is not None:
                await_event(self._transport, transit.event)
                outcome = transit.read(outcome)
            yield outcome
