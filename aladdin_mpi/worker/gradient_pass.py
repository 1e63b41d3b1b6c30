"""One step's gradient, from backward to the wire: computed, checked, clipped and handed over."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from aladdin_mpi.accelerator import CopyStream, is_accelerator
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
from aladdin_mpi.worker.node import NodeLeader, NodeSum
from aladdin_mpi.worker.step import Compute, ModelledStep, Skip


# -- backward -------------------------------------------------------------------------------------
class RealStep:
    """A step that takes its time: autograd completes the buckets.

    Args:
        slowdown: the factor by which the step takes longer than its computing.
        wait_free: buckets are reported during backward; otherwise when it is over.
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
        self._last: float | None = None
        """Computing time of the last step, in seconds."""
        self.watch: BucketWatch | None = replica.watch(layout, wait_free)

    def compute_into(
        self,
        vector: Tensor,
        batch: SampleLease,
        on_bucket: OnBucket,
        idle_until: IdleUntil | None = None,
        before_forward: OnBucket | None = None,
    ) -> float | Tensor | None:
        """Compute the batch's gradient into the flat ``vector``; return the loss."""
        assert self.watch is not None
        self._replica.bind_gradients(vector)
        self._replica.keep_buffers()
        # A slow worker's gradient leaves at the end of its step, as old as that is long. So the
        # worker sleeps before it computes, for a time given by its last step, or after its first.
        is_first = self._last is None
        if self._slowdown > 1 and self._last is not None:
            self._transport.sleep((self._slowdown - 1) * self._last)
        start = self._transport.now()
        self.watch.begin(on_bucket)
        loss = self._compute(batch)
        is_skipped = isinstance(loss, Skip)
        self._replica.end_backward(is_skipped)
        self.watch.end()
        self._last = self._transport.now() - start
        if self._slowdown > 1 and is_first:
            self._transport.sleep((self._slowdown - 1) * self._last)
        return None if isinstance(loss, Skip) else loss

    def close(self) -> None:
        """Remove the hooks from the model."""
        if self.watch is not None:
            self.watch.close()


# -- values that are not finite -------------------------------------------------------------------
Finding = tuple[Reason, int]
"""What is wrong with a gradient, and the first bucket in which it is."""


class GradientCheck:
    """Checks a gradient bucket by bucket, and clears what is not finite.

    From the first bucket that is not finite on, the rest of the gradient is cleared too;
    what came before may have been sent, and is finite. On a CPU the check is one sum over
    values that backward has just written. On a GPU nothing waits: clearing depends on the sums
    there, and the finding is known when they have reached the host (:func:`finding_in`).

    Attributes:
        finding: on the host.
        sums: on a GPU: the running sum after each of ``buckets``.

    The check costs half as much as adding a gradient to another: 0.2 ms for a bucket of 4 MB and
    6 ms for 25 million values, where adding takes 0.4 and 10 ms (one core of a server). For all
    of ResNet-20 (270,000 values, which stay in the cache) it takes 0.02 ms.
    """

    def __init__(self) -> None:
        self.finding: Finding | None = None
        self._refused = False
        self.buckets: list[int] = []
        self.sums: list[Tensor] = []

    def refuse(self) -> None:
        """Clear all that follows."""
        self._refused = True

    def look(self, values: Tensor, bucket: int) -> None:
        """Check what is sent about ``bucket``; clear it in place if it is not finite."""
        if values.is_meta:
            return
        if not values.is_cpu:
            self._look_there(values, bucket)
        elif not (self._refused or is_finite(values)):
            self._refused = True
            self.finding = _kind(values.isnan().any().item()), bucket
        if self._refused:
            values.zero_()

    def _look_there(self, values: Tensor, bucket: int) -> None:
        """Add to the running sum, in which what is not finite stays so."""
        here = total(values)
        self.sums.append(self.sums[-1] + here if self.sums else here)
        self.buckets.append(bucket)
        self.clear_unsound(values)

    def clear_unsound(self, values: Tensor) -> None:
        """Clear ``values`` if anything that was checked is not finite; on a GPU it decides."""
        if self.sums:
            values.masked_fill_(~self.sums[-1].isfinite(), 0.0)
        elif self.finding:
            clear(values)


def finding_in(sums: Sequence[float], buckets: Sequence[int]) -> Finding | None:
    """Return the finding in a GPU's sums, when they have reached the host."""
    for running, bucket in zip(sums, buckets, strict=True):
        if not isfinite(running):
            return _kind(running != running), bucket
    return None


def _kind(is_nan: object) -> Reason:
    return Reason.NAN if is_nan else Reason.INFINITE


# -- clipping -------------------------------------------------------------------------------------
class Clipping:
    """A bound on gradients' norms; decides whether buckets may leave before it is known to hold.

    Args:
        norm: largest L2 norm of a gradient; None: any.
        kind: what it is the norm of: a worker's ``own`` gradient, which is known when backward
            is over; its ``parts``, each bucket's being held to its share, so that they can
            leave at once; or the ``mean`` of all workers', by the algorithm.
        per_step: whether a step may ask for it while it is computed (:meth:`check_step`): no
            bucket leaves early in the first one, nor in later ones if that one is clipped.
        wait_free: nothing else prevents buckets from leaving early.
    """

    def __init__(
        self,
        norm: float | None = None,
        kind: Clips = "own",
        per_step: bool = False,
        wait_free: bool = True,
    ) -> None:
        self.norm = norm
        self.kind = kind
        self.is_wait_free = wait_free and not (kind == "own" and norm is not None)
        self._awaits_first = per_step and kind == "own"

    @property
    def tells_at_once(self) -> bool:
        """Whether a bucket may leave as soon as it is complete."""
        return self.is_wait_free and not self._awaits_first

    def check_step(self) -> None:
        """Check that the gradient of the step that is being computed can still be clipped.

        Raises:
            UserError: parts of it have been sent already.
        """
        if self.kind == "parts" and self.is_wait_free:
            raise UserError(
                "training loop: run.clip_grad_norm_() comes too late for this algorithm, which "
                "sends parts of the gradient during backward(). Pass clip= to DataParallel "
                "instead."
            )
        if self.kind == "own" and self.tells_at_once:
            raise UserError(
                "training loop: run.clip_grad_norm_() was not called in the first step, so parts "
                "of this gradient may have been sent already. Call it in every step, or pass "
                "clip= or wait_free=False."
            )

    def note_step(self, is_clipped: bool) -> None:
        """A step has been computed; the first one decides for all later ones."""
        if self._awaits_first:
            self.is_wait_free = self.is_wait_free and not is_clipped
            self._awaits_first = False


# -- the gradient of one step ---------------------------------------------------------------------
@dataclass
class GradientStages:
    """What every gradient of a worker passes through; the same objects for all steps.

    Args:
        transport: among all ranks, for reports to rank 0.
        step: computes.
        node: adds up the gradients of the node that this worker leads; None: it leads none.
        marks: of unused parameters.
        writes_marks: whether others have to know which parameters a gradient does not reach.
        reports_unused: whether the first unused parameter has yet to be reported to rank 0.
        max_loss: the gradient of a larger loss is refused; None: of none.
    """

    transport: Transport
    layout: Layout
    replica: Replica | PhantomReplica
    step: RealStep | ModelledStep
    clipping: Clipping
    node: NodeLeader | None
    marks: UnusedMarks
    writes_marks: bool
    reports_unused: bool
    max_loss: float | None

    def is_too_large(self, loss: float | Tensor | None) -> bool:
        """Wait for the device that computes the loss, if there is a largest one."""
        return self.max_loss is not None and loss is not None and not loss <= self.max_loss


class GradientPass:
    """One step's gradient, from backward to the wire.

    The methods are in the order in which a gradient passes through them. :meth:`compute` runs
    forward and backward, during which :meth:`_complete` is called for each bucket and hands it
    over; :meth:`finish` ends the pass, with those that had to wait until backward is over.

    Args:
        lease: the samples of the step.
        part: this rank's part of them, which is all but where it leads a node.
        vector: the flat gradient; its contents are overwritten.
        on_bucket: called with every bucket, in order, when it is final; None: nothing is.
        idle_until: see :meth:`Transport.sleep_between`.
        before_forward: see :meth:`ModelledStep.compute_into`.

    Attributes:
        loss_scale: what the script has multiplied the loss by.
        norm: largest norm of the gradient; None: any.
        unused: parts of the vector without a gradient, of the buckets handed over so far.
        loss: of the batch, when it is computed.
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
        self._sum: NodeSum | None = None
        self._held_back: list[Bucket] = []
        self._is_held_back = not clipping.tells_at_once
        self._on_bucket = on_bucket or _ignore
        self._hand_over = self._held_back.append if self._is_held_back else self._on_bucket
        self._idle_until = _for_ever if on_bucket is None else idle_until
        self._part_norm = clipping.kind == "parts"
        self.lease = lease
        self.part = part
        self.vector = vector
        self.loss_scale = 1.0
        self.norm = clipping.norm
        self.check = GradientCheck()
        self.unused: list[slice] = []
        self.loss: float | Tensor | None = None

    # -- before backward, or during it, by the training loop ----------------------------------
    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss to be differentiated in half precision; gradients lose the scale."""
        self.loss_scale = self.lease.scale
        return loss * self.loss_scale

    def clip_to(self, norm: float) -> None:
        """Clip this gradient.

        Raises:
            UserError: parts of it have been sent already.
        """
        self._stages.clipping.check_step()
        self.norm = norm

    # -- backward -------------------------------------------------------------------------------
    def compute(self) -> None:
        """Compute the batch's loss and gradient."""
        stages, vector = self._stages, self.vector
        if stages.node is not None:
            self._sum = stages.node.begin(vector)
        self.loss = stages.step.compute_into(
            vector,
            self.part,
            self._complete,
            self._idleness() if vector.is_meta else None,
            self._before_forward,
        )
        if self._held_back:  # so all of it can still be cleared
            if stages.is_too_large(self.loss):
                self.check.refuse()
                clear(vector)
            self.check.clear_unsound(vector)

    def _idleness(self) -> IdleUntil | None:
        """Return what says how long :meth:`_complete` would have no effect; None: it has one."""
        has_effect = self._sum is not None or self._is_held_back
        return None if has_effect else self._idle_until

    def leave_out(self, unused: Set[int]) -> None:
        """Hand over a gradient of zero: there are no samples for this worker.

        A sum over workers gets nothing from it. A step of its own is one along a gradient of zero,
        so that workers that average their models remain equal to one process; it leaves alone
        what the last batch did not use.

        Args:
            unused: the parameters that the last batch did not use.
        """
        stages, vector = self._stages, self.vector
        if stages.node is not None:
            self._sum = stages.node.begin(vector)
        clear(vector)
        stages.replica.use_none()
        for bucket in stages.layout.buckets:
            for each in self._marked_and_summed(bucket):
                if unused and self._is_real:
                    self._note_unused(each, unused)
                self._hand_over(each)

    # -- each bucket ------------------------------------------------------------------------------
    def _complete(self, bucket: Bucket) -> None:
        """Backward has completed a bucket: take off the scale, add up the node's, check, clip."""
        if self.loss_scale != 1.0:
            scale(bucket.of(self.vector), 1 / self.loss_scale)
        stages = self._stages
        for each in self._marked_and_summed(bucket):
            if self._is_real:
                values, unused = each.of(self.vector), stages.replica.unused
                if unused:
                    self._note_unused(each, unused)
                self.check.look(values, each.index)
                if self._part_norm and self.norm is not None:
                    clip_norm(values, self.norm * sqrt(each.numel / stages.layout.numel))
            self._hand_over(each)

    def _marked_and_summed(self, bucket: Bucket) -> Sequence[Bucket] | Iterator[Bucket]:
        """Mark unused parameters; return the buckets that are complete on the whole node."""
        stages = self._stages
        if stages.writes_marks and self._is_real:
            stages.marks.write(bucket, bucket.of(self.vector), stages.replica.unused)
        return (bucket,) if self._sum is None else self._sum.complete(bucket)

    def _note_unused(self, bucket: Bucket, unused: Set[int]) -> None:
        """Note the parts of a bucket, summed over the node, that have no gradient."""
        stages = self._stages
        if stages.reports_unused and self.part.size:
            stages.reports_unused = False
            rank, start = stages.transport.rank, self.lease.start
            report(stages.transport, Refusal(Reason.UNUSED, rank, sample=start))
        if self._sum is None:
            parts = stages.marks.parts(bucket, unused)
        else:
            parts = stages.marks.read(bucket, bucket.of(self.vector), unused)
        self.unused = joined([*self.unused, *shifted(parts, bucket.start)])

    # -- after backward ---------------------------------------------------------------------------
    def finish(self) -> None:
        """Clip the gradient as a whole, and hand over the buckets that waited for that."""
        clipping = self._stages.clipping
        if self.norm is not None and clipping.kind == "own":
            clip_norm(self.vector, self.norm)
        if self.lease.size > 0:
            clipping.note_step(is_clipped=self.norm is not None)
        for bucket in self._held_back:
            self._on_bucket(bucket)


def _ignore(bucket: Bucket) -> None:
    """Do nothing (default callback)."""


def _for_ever() -> tuple[()]:
    """Return that nothing will ever have to be done."""
    return ()


# -- its outcome ----------------------------------------------------------------------------------
class Outcome(NamedTuple):
    """The outcome of the step of ``lease``: ``finding`` is what its gradient is refused for."""

    lease: SampleLease
    loss: float | None
    finding: Finding | None


class _InTransit(NamedTuple):
    """Numbers on their way from a device: sums of buckets, then perhaps the loss."""

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
        device: computes the steps.
    """

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self._transport = transport
        self._copies = CopyStream(device) if is_accelerator(device) else None
        self._unread: deque[tuple[Outcome, _InTransit | None]] = deque()
        self.lag = 0 if self._copies is None else 1
        """Steps whose outcome may still be in transit when the next one has been started."""

    def __len__(self) -> int:
        """Return how many have not been read."""
        return len(self._unread)

    def note(self, step: GradientPass) -> None:
        """A step has been computed, or given to the device."""
        loss, check = step.loss, step.check
        numbers = list(check.sums)
        known: float | None = None
        if not isinstance(loss, torch.Tensor):
            known = loss
        elif self._copies is None:
            known = loss.item()  # of another device than the model's
        else:
            numbers.append(loss)
        transit = self._send(numbers, check.buckets) if numbers else None
        lease = step.part._replace(scale=step.loss_scale)
        self._unread.append((Outcome(lease, known, check.finding), transit))

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
