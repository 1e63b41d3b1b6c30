"""Worker runtime: supplies batches, gradients and the learning rate to an algorithm."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from math import isfinite, nan
from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.accelerator import is_accelerator, random_state, set_random_state
from aladdin_mpi.control.budget import SampleClient, SampleLease, WorkerReport
from aladdin_mpi.control.refusals import Reason, Refusal, report
from aladdin_mpi.flat.gradients import OnBucket
from aladdin_mpi.flat.layout import Bucket, Layout
from aladdin_mpi.flat.replica import FlatModel, PhantomReplica, Replica
from aladdin_mpi.flat.state import TOTAL, Stateful, saved
from aladdin_mpi.flat.unused import Unused, UnusedMarks, within
from aladdin_mpi.optimizers.sgd import divisor, unscaled
from aladdin_mpi.transport.base import IdleUntil, Transport, survivors_from
from aladdin_mpi.worker.gradient_pass import (
    Clipping,
    GradientPass,
    GradientStages,
    Outcome,
    Outcomes,
    RealStep,
)
from aladdin_mpi.worker.island import Island
from aladdin_mpi.worker.step import Compute, Loss, ModelledStep, StepTimeModel


class SampleMilestones:
    """Completion of the steps before a sample number ``samples``, with callbacks.

    Used by message handlers, if workers proceed in rounds.
    """

    def __init__(self, transport: Transport) -> None:
        self.samples = 0
        self._transport = transport
        self._is_stepping = False
        self._waiting: list[tuple[int, Callable[[], None]]] = []

    def when(self, samples: int, action: Callable[[], None]) -> None:
        """Call ``action`` once all steps of samples before ``samples`` are complete.

        It is called like a handler between two steps, as early as possible, or at once if the
        segment's last step is complete.
        """
        if not self._is_stepping and self.samples >= samples:
            action()
        else:
            self._waiting.append((samples, action))

    def advance(self, samples: int, is_stepping: bool) -> None:
        """Record that all steps before ``samples`` are complete; another may follow."""
        with self._transport.atomic():
            self.samples, self._is_stepping = samples, is_stepping
            waiting, self._waiting = self._waiting, []
            for least, action in waiting:
                if samples >= least:
                    action()
                else:
                    self._waiting.append((least, action))


class RandomState:
    """A rank's random state: the host's and, with an accelerator, the device's.

    Ranks that share a process, as in simulations, each compute with their own.

    Args:
        device: device that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._accelerator = device if is_accelerator(device) else None
        self.host = torch.get_rng_state()
        self.device: Tensor | None = None
        self.keep()

    def set(self, host: Tensor, device: Tensor | None) -> None:
        """Restore the states of a checkpoint."""
        self.host, self.device = host, device

    def keep(self) -> None:
        """Save the process's states."""
        self.host = torch.get_rng_state()
        if self._accelerator is not None:
            self.device = random_state(self._accelerator)

    def restore(self) -> None:
        """Set the process's states from the saved ones."""
        torch.set_rng_state(self.host)
        if self._accelerator is not None:
            set_random_state(self._accelerator, self.device)

    def during(self, compute: Compute) -> Compute:
        """Wrap ``compute`` to use these random states; the process's are preserved."""
        process = RandomState(self._accelerator or torch.device("cpu"))

        def compute_with_state(lease: SampleLease) -> Loss:
            process.keep()
            self.restore()
            loss = compute(lease)
            self.keep()
            process.restore()
            return loss

        return compute_with_state


class Worker(Stateful):
    """One worker's replica and its supply of batches and gradients.

    ``index`` counts the algorithm's workers from 0, and ``count`` is their number; an island is one
    of them. ``servers`` is the number of servers among all ranks, which are the first ones.

    A gradient that is not finite is refused on the worker that computes it, transparently to
    the algorithm: non-finite values are zeroed before they are sent, and the step continues as
    usual. The refusal is reported to rank 0. ``refused`` counts such steps, ``in_a_row`` those
    at the end of the steps so far.

    A module with parts has a step for each part in every batch, one after another. To the algorithm
    these are steps of the whole model, with gradients that do not use the other parts.

    Args:
        transport: transport among the servers and workers of the algorithm.
        compute: see :data:`~aladdin_mpi.worker.step.Compute`.
        pace: duration of steps, which is simulated if ``seconds`` is set.
        batch_size: samples of one step.
        schedule: learning rate as a function of the samples drawn by all workers.
        clipping: clips gradients; its ``wait_free``: report a bucket as soon as backward has
            completed it (wait-free backpropagation), not all at the end of backward.
        lockstep: batches are parts of rounds that all workers take together.
        max_loss: refuse the gradient of a batch with a larger loss. The loss is known only
            after backward, so ``clipping`` must not be wait-free.
        rate: converts the schedule's learning rate to that of the current step, if rank 0
            does not know it.
        after_step: called with a batch after the algorithm's step.
        on_empty: called with a lease without samples for this worker, while other workers
            may have some.
        whole: transport among all ranks, if it differs.
        servers: number of servers in ``whole``, the first ranks; None: those of ``layout``.
        island: the island of which this rank is a member; None: it is a worker by itself.
        draws: supplies samples; None: from rank 0.
        marks_unused: whether other ranks have to know the unused parameters.
        steps_unused: whether the algorithm steps parameters that a batch does not use; the
            first time is reported to rank 0.
        project: changes a flat model after a step, as set by the script; None: nothing does.
        lr_scale: factor on the learning rate for a number of workers.
    """

    SAVED = (
        saved("samples", "left_out")
        | saved("computed", "refused", merge=TOTAL)
        | saved("in_a_row", pace="_pace.random")
    )

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        replica: FlatModel,
        compute: Compute,
        pace: StepTimeModel,
        batch_size: int,
        schedule: Callable[[int], float],
        clipping: Clipping,
        lockstep: bool = False,
        max_loss: float | None = None,
        rate: Callable[[float], float | None] = lambda lr: None,
        after_step: Callable[[SampleLease], None] = lambda lease: None,
        on_empty: Callable[[SampleLease], None] = lambda lease: None,
        whole: Transport | None = None,
        servers: int | None = None,
        island: Island | None = None,
        draws: SampleClient | None = None,
        marks_unused: bool = False,
        steps_unused: bool = False,
        project: Callable[[Tensor], None] | None = None,
        lr_scale: Callable[[int], float] = unscaled,
    ) -> None:
        self.transport = transport
        self.whole = whole or transport
        self.layout = layout
        self.replica = replica
        self.parameters: Tensor = replica.parameters
        self.servers = layout.servers if servers is None else servers
        """Number of servers among all ranks; the next rank is the first that computes."""
        self.index = transport.rank - layout.servers
        self.count = transport.size - layout.servers
        self.lease = self.part = SampleLease(0, 0, 0)
        """Lease of the current step, and this rank's part of it: all, except in an island."""
        self.samples = 0
        self.left_out = 0
        """Number of those samples without data, in epochs that were left early."""
        self.computed = 0
        self.refused = 0
        self.in_a_row = 0
        self.lr = 0.0
        """Learning rate of the current batch."""
        self.turn = 0
        """Number of the part that the current batch steps."""
        self.reached = SampleMilestones(transport)
        self.clipping = clipping
        self._pace = pace
        self._batch_size = batch_size
        self._schedule = schedule
        self._island = island
        whole_model = replica if island is None else island.whole
        assert isinstance(whole_model, (Replica, PhantomReplica))
        self.model = whole_model
        """This rank's replica of the whole model."""
        self._draws = draws or SampleClient(self.whole)
        self._outcomes = Outcomes(self.whole, replica.parameters.device)
        self._reports: deque[WorkerReport] = deque()
        self._on_loss: list[Callable[[float], None]] = []
        self._lockstep = lockstep
        self._rate = rate
        self._after_step = after_step
        self._on_empty = on_empty
        self._batch_unused: list[Set[int]] = list(whole_model.outside)
        """The parameters that the last batch did not use, for each part."""
        self._loss = nan
        """Loss of the last part that has one in the batch whose outcomes are being processed."""
        self.project = project or (lambda x: None)
        self.projects = project is not None
        """Whether :attr:`project` changes models."""
        self._lr_scale = lr_scale
        self._steps_unused = steps_unused
        self.step: RealStep | ModelledStep
        whole_layout = layout if island is None else island.layout
        if pace.seconds is not None:
            self.step = ModelledStep(
                transport, whole_layout, whole_model, compute, pace.seconds, pace
            )
        else:
            assert isinstance(whole_model, Replica)
            wait_free = clipping.is_wait_free
            self.step = RealStep(
                transport, whole_layout, whole_model, compute, pace.slowdown, wait_free
            )
        self._stages = GradientStages(
            self.whole,
            whole_layout,
            whole_model,
            self.step,
            clipping,
            island,
            UnusedMarks(replica.sizes, layout),
            marks_unused,
            steps_unused,
            max_loss,
        )
        self.current = GradientPass(self._stages, self.lease, self.part, self.parameters)
        """The gradient of the current step; before the first one, of an empty batch."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; earlier versions had no ``left_out``."""
        super().load_state_dict({"left_out": 0, **state})

    def on_loss(self, action: Callable[[float], None]) -> None:
        """Call ``action`` with the finite loss of each step whose gradient is not refused.

        On an accelerator that is one step late; :meth:`settle` waits for it.
        """
        self._on_loss.append(action)

    @property
    def share(self) -> float:
        """Weight of the current batch's mean gradient in the mean over all workers.

        It is 1 if all workers have the same number of samples; the mean of gradients times
        shares is the mean over all samples of the round.
        """
        if not self._lockstep:
            return 1.0
        return self.lease.size * (self.count - len(self.lease.absent)) / self.lease.whole

    @property
    def is_first_member(self) -> bool:
        """Whether this rank is the first of its island, or a worker by itself."""
        return self._island is None or self._island.is_first

    @property
    def ends_batch(self) -> bool:
        """Whether the current step is the batch's last one."""
        return self.turn == len(self.model.outside) - 1

    @property
    def survivors(self) -> int:
        """The number of workers, this one included, that are not known to have failed."""
        return survivors_from(self.transport, self.layout.servers)

    @property
    def divisor(self) -> float:
        """Divisor of gradients, see :func:`~aladdin_mpi.optimizers.sgd.divisor`."""
        return divisor(self.count, self.survivors, self._lr_scale)

    def shares_of(self, ranks: Sequence[int]) -> float:
        """Return the sum of the shares of ``ranks`` in the current round.

        The sum of gradients times shares, divided by it, is the mean over their samples. It equals
        the number of ranks, unless a worker with more or fewer samples than others has failed.
        Without samples it is 1, as the gradients are zero.
        """
        lease, workers = self.lease, range(self.layout.servers, self.transport.size)
        members = [rank for rank in workers if rank not in lease.absent]
        count = len(members)
        samples = sum(lease.size_of(i, count) for i, rank in enumerate(members) if rank in ranks)
        return samples * count / lease.whole or 1.0

    # -- batches ------------------------------------------------------------------------
    def batches(self) -> Iterator[SampleLease]:
        """Yield this worker's batches, for each part, until the segment's samples are used up.

        The next lease (or several, on a slow network) is requested during the computation of
        the current one, which hides the latency.
        """
        draws, end = self._draws, self.reached.samples
        island, size = self._island, self._batch_size
        draws.open()
        if island is not None:
            size *= island.size
            island.open()
        self.lr = self._schedule(self.lease.start)
        draws.request(size, self._take_report())
        has_ended = False
        while draws.outstanding:
            self.lease = draws.take()
            self._begin_turn(0)
            self.lr = self._schedule(self.lease.start)
            self.part = self.lease if island is None else island.divide(self.lease)
            self.lease = self.lease._replace(absent=self.part.absent)
            if self.lease.whole == 0:
                if not has_ended and island is not None:
                    island.exchange_models()  # of the last step
                if not has_ended:
                    self._note_empty()
                has_ended = True
                continue  # later leases are empty too
            if self.part.size == 0 and island is None:
                self._note_empty()
            for _ in range(draws.short):
                draws.request(size, self._take_report())
            self.reached.advance(self.lease.start, is_stepping=True)
            for turn in range(len(self.model.outside)):
                self._begin_turn(turn)
                yield self.lease
                self._after_step(self.lease)
            end = self.lease.start + self.lease.whole
        if island is not None:
            island.flush()
        self.settle()
        self.reached.advance(end, is_stepping=False)
        draws.report(self._take_report())
        while self._reports:
            draws.report(self._take_report())

    def _begin_turn(self, turn: int) -> None:
        self.turn = self.model.turn = turn

    def _take_report(self) -> WorkerReport:
        """Return the oldest report that has not been sent."""
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
        """Request the end of the run."""
        self._draws.stop()

    def end_segment(self) -> None:
        """Request the end of the segment, and so a checkpoint."""
        self._draws.end_segment()

    def close_run(self) -> None:
        """Request the end of the run without its results."""
        self._draws.close_run()

    def pass_over(self, samples: int) -> None:
        """Request that samples before number ``samples`` of the run are not granted any more."""
        self._draws.pass_over(samples)

    # -- gradients ----------------------------------------------------------------------
    def gradient(
        self,
        vector: Tensor,
        on_bucket: OnBucket | None = None,
        idle_until: IdleUntil | None = None,
        before_forward: OnBucket | None = None,
    ) -> None:
        """Compute the current batch's gradient into the flat ``vector``, overwriting it.

        ``on_bucket`` is called for every bucket, in order, as soon as it is complete: during
        backward, or spread over the simulated one. A simulated step may skip it while it has
        no effect by ``idle_until`` (see :meth:`Transport.sleep_between`), and calls
        ``before_forward`` when the forward pass reaches a bucket. Without samples the gradient is
        zero. In a refused gradient the first bucket that is not finite and all later ones are zero.
        """
        part = self.part
        step = self.current = GradientPass(
            self._stages, self.lease, part, vector, on_bucket, idle_until, before_forward
        )
        if part.size:
            step.compute()
            self.computed += 1
            if not self.turn:
                self.samples += part.size
        else:
            step.leave_out(self._unused_without_batch(), self._pass_empty)
        step.finish()
        if part.size:
            self._batch_unused[self.turn] = self.model.unused
            self._outcomes.note(step, self.ends_batch)
            self.settle(self._outcomes.lag)

    def _pass_empty(self) -> None:
        """Handle a lease without samples for this member, after models have been exchanged.

        The training loop may then wait for those of other workers, as at the end of an epoch.
        """
        if self._island is not None and not self.turn:
            self._note_empty()

    def _note_empty(self) -> None:
        """Handle a lease without samples, before which the training loop may use the model."""
        self.model.refresh()
        self._on_empty(self.part)

    def _unused_without_batch(self) -> Set[int]:
        """Return the parameters that a step without samples may leave out.

        The marks of an island's members with samples decide among all parameters.
        """
        if self._island is None or not self.lease.size:
            return self._batch_unused[self.turn]
        return set(range(len(self.model.sizes)))

    def unused(self, part: slice) -> Unused:
        """Return the parts of ``part``, relative to its start, that have no gradient.

        These belong to parameters that the current step's batch did not use, which must not be
        stepped. For a bucket they are known when ``on_bucket`` is called. For a sum over workers
        see :meth:`unused_by_all`.
        """
        unused = self.current.unused
        return within(part, unused) if unused else ()

    def unused_by_all(self, bucket: Bucket, total: Tensor) -> Unused:
        """Return the parts of a bucket of a sum of gradients that no worker has a gradient for.

        The sum is read, which waits for a device, only if this worker itself has no gradient for
        some parameter.
        """
        if self._steps_unused:
            return ()
        return self._stages.marks.read(bucket, total, self.model.unused)

    def settle(self, lag: int = 0) -> None:
        """Process the outcomes of all steps but the newest ``lag``."""
        for outcome in self._outcomes.read(lag):
            self._process_outcome(outcome)

    def _process_outcome(self, outcome: Outcome) -> None:
        """Count a step; if it is refused, report that to rank 0."""
        lease, loss, finding, ends_batch = outcome
        reason, bucket = finding or (None, -1)
        was_scaled = reason is not None and lease.scale != 1.0
        if was_scaled:
            reason = Reason.SCALE
        if reason is None and self._stages.is_too_large(loss):
            reason = Reason.LOSS
        refused = reason is not None
        if refused:
            self.refused += 1
            self.model.restore_buffers(len(self._outcomes))
        elif loss is not None and not isfinite(loss):
            reason = Reason.LOSS_ONLY
        elif loss is not None:
            for action in self._on_loss:
                action(loss)
        if not was_scaled:  # otherwise a smaller scale is tried first
            self.in_a_row = self.in_a_row + 1 if refused else 0
        value = nan if loss is None else loss
        if reason is not None:
            where = self.whole.rank, bucket, lease.start
            report(self.whole, Refusal(reason, *where, value, self.in_a_row))
        if refused or loss is not None:
            self._loss = nan if refused else value
        if ends_batch:
            self._reports.append(WorkerReport(lease.size, self._loss))
            self._loss = nan

    def close(self) -> None:
        """Remove the hooks from the model at the end of the run."""
        self.step.close()
