"""Sums that tolerate failures: surviving ranks repeat the step that was in progress.

A rank may have all sums of a step when another rank detects, in the middle of them, that a third
has failed. Neither can be more than one step ahead of the other, since every sum needs both. So
surviving ranks report the number of steps they have completed to rank 0. If a rank has sums that
others lack, it sends them, including the failed rank's gradients; if none has them, all repeat
the step without the failed rank. In either case all surviving ranks continue bit-identically.

Until the first failure the engine's collectives can be used. They need all ranks, so after it
messages between ranks replace them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from aladdin_mpi.allreduce import choose
from aladdin_mpi.allreduce.base import AllReduce, PendingSum
from aladdin_mpi.allreduce.messages import DirectAllReduce, RingAllReduce
from aladdin_mpi.allreduce.with_residual import SumCodec, make_all_reduce, residual_of
from aladdin_mpi.codec.base import DenseWire
from aladdin_mpi.codec.residual import Residual
from aladdin_mpi.control.tags import COORDINATOR, Tag
from aladdin_mpi.errors import PeerFailedError
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.flat.vectors import copy
from aladdin_mpi.options.algorithms import FAULT_TOLERANT_ALLREDUCES
from aladdin_mpi.transport.base import Transport, wait_ended
from aladdin_mpi.transport.group import PartOfRanks

INACTIVE = -1
"""Replaces the number of steps of a rank that has failed or ended."""


class Sums(NamedTuple):
    """A step's sums: one for each bucket, over the vectors of ``ranks``."""

    totals: list[tuple[Bucket, Tensor]]
    ranks: Sequence[int]


class _StartedSum(NamedTuple):
    """A started sum: ``values`` is this rank's part; ``pending`` is None if it could not start."""

    bucket: Bucket
    values: Tensor
    pending: PendingSum | None


def _in_order(started: Sequence[_StartedSum]) -> list[Bucket]:
    """Return the buckets of a step's sums in the order of the flat vector."""
    return sorted((each.bucket for each in started), key=lambda bucket: bucket.start)


class _Agreement(NamedTuple):
    """``steps`` completed by each rank; ``all_end``: all ranks are at the end of the segment."""

    steps: list[int]
    all_end: bool


class SurvivingSums:
    """The sums of one step after another: all buckets of a step, or none.

    Every rank of ``transport`` takes part; rank 0 must not fail. ``new_vector`` makes a flat vector
    on the gradients' device; two are needed. ``buckets`` are the parts that will be summed.
    """

    def __init__(
        self,
        name: str,
        transport: Transport,
        new_vector: Callable[[], Tensor],
        wire_dtype: torch.dtype,
        buckets: Sequence[Bucket],
    ) -> None:
        self._name = name
        self._transport = transport
        self._wire_dtype = wire_dtype
        self._new_vector = new_vector
        # Two, since a rank may request the sums of the last step during the next one.
        self._totals = [new_vector(), new_vector()]
        self._device = self._totals[0].device
        self._members = list(range(transport.size))
        self._keys = 1 + max(bucket.index for bucket in buckets)
        self._first_key = 0
        self._steps = 0
        self._started: list[_StartedSum] = []
        self._last: list[Bucket] = []
        """The buckets of the last complete step, in order."""
        self._is_broken = False
        self._received: list[int] | None = None
        """The ranks of this step's sums, if they have been received in :meth:`assist`."""
        self._all_reduce = self._make()
        transport.on_failure(self._lose)
        self._lose_failed()

    def _make(self) -> AllReduce:
        transport, dtype = self._transport, self._wire_dtype
        if not self._first_key:
            return choose.by_transport(self._name, transport, self._device, dtype)
        part = PartOfRanks(transport, self._members)
        direct = DirectAllReduce(part, self._device, dtype, self._first_key)
        if dtype == torch.bfloat16:
            return direct
        ring = RingAllReduce(part, self._device, dtype, self._first_key)
        return ring if self._name == "ring" else choose.BySize(direct, ring)

    def describe(self) -> str:
        """Return a short description of the method."""
        return f"{self._all_reduce.describe()}; surviving ranks continue if others fail"

    def close(self) -> None:
        """Close the all-reduce in use."""
        self._all_reduce.close()

    # -- a step ---------------------------------------------------------------------------
    def start(self, values: Tensor, bucket: Bucket) -> None:
        """Start summing ``values``, which must not change before :meth:`finish` returns the sum."""
        pending = None
        if not self._is_broken:
            total = bucket.of(self._totals[self._steps % 2])
            copy(total, values)
            try:
                pending = self._all_reduce.start(total, bucket.index)
            except PeerFailedError:  # handled by finish(), not raised out of backward
                self._is_broken = True
        self._started.append(_StartedSum(bucket, values, pending))

    def finish(self) -> Sums:
        """Wait for the step's sums, which are written into the values passed to :meth:`start`."""
        has_sums = self._received is not None
        ranks, self._received = self._received or self._members, None
        while not has_sums:
            ranks = self._members
            try:
                self._complete()
                has_sums = True
            except PeerFailedError:
                has_sums = self._recover()
        totals = self._totals[self._steps % 2]
        summed = [(bucket, values) for bucket, values, _ in self._started]
        for bucket, values in summed:
            copy(values, bucket.of(totals))
        self._steps += 1
        self._last = _in_order(self._started)
        self._started.clear()
        return Sums(summed, ranks)

    def _complete(self) -> None:
        """Wait for all sums.

        Raises:
            PeerFailedError: a rank failed before all sums were complete.
        """
        failed = self._transport.failed.intersection(self._members)
        if self._is_broken or failed:
            raise PeerFailedError(min(failed, default=COORDINATOR), "")
        totals = self._totals[self._steps % 2]
        for bucket, _, pending in self._started:
            assert pending is not None
            result, total = pending.wait(), bucket.of(totals)
            if result.data_ptr() != total.data_ptr():
                copy(total, result)

    def settle(self) -> None:
        """End the segment: wait until no rank needs this rank's sums any more."""
        agreement = self._agree(is_at_end=True)
        while not agreement.all_end:
            self._regroup(agreement)
            self._send_last_sums(agreement)
            agreement = self._agree(is_at_end=True)

    def assist(self) -> None:
        """Between steps: regroup if a member has failed, since others may wait for it.

        Those that lack the sums of the last step receive them from this rank.
        """
        before = self._members
        if self._received is None and self._transport.failed.intersection(before):
            self._received = before if self._recover() else None

    # -- after a failure --------------------------------------------------------------------
    def _lose(self, rank: int) -> None:
        """Abandon sums in progress, even with surviving ranks: they may have abandoned them too."""
        if rank in self._members:
            self._all_reduce.abandon(rank)

    def _lose_failed(self) -> None:
        """Abandon the sums of a new all-reduce if a member failed before it was made."""
        with self._transport.atomic():
            for rank in self._transport.failed.intersection(self._members):
                self._lose(rank)

    def _recover(self) -> bool:
        """Regroup without failed ranks; return whether another rank had this step's sums."""
        while True:
            agreement = self._agree(is_at_end=False)
            self._regroup(agreement)
            try:
                if max(agreement.steps) > self._steps:
                    self._receive_sums(agreement)
                    return True
            except PeerFailedError:
                continue  # the rank that had them has failed as well
            self._send_last_sums(agreement)
            self._restart()
            return False

    def _restart(self) -> None:
        started, self._started = self._started, []
        for bucket, values, _ in started:
            self.start(values, bucket)

    def _agree(self, is_at_end: bool) -> _Agreement:
        """Return the numbers of steps that rank 0 has collected from all surviving ranks."""
        mine = torch.tensor([self._steps, is_at_end])
        answer = torch.zeros(1 + self._transport.size, dtype=torch.int64)
        if self._transport.rank == COORDINATOR:
            answer = self._gather(mine)
        else:
            self._transport.wait(self._transport.isend(mine, COORDINATOR, Tag.STEPS))
            self._transport.wait(self._transport.irecv(answer, COORDINATOR, Tag.STEPS_OF_ALL))
        all_end, *steps = answer.tolist()
        return _Agreement(steps, bool(all_end))

    def _gather(self, mine: Tensor) -> Tensor:
        """Collect all ranks' reports at rank 0 and send them to all."""
        transport = self._transport
        steps = [INACTIVE] * transport.size
        steps[COORDINATOR], all_end = mine.tolist()
        for rank in self._members[1:]:
            report = torch.zeros_like(mine)
            with suppress(PeerFailedError):
                transport.wait(transport.irecv(report, rank, Tag.STEPS))
                steps[rank] = int(report[0])
                all_end = min(all_end, int(report[1]))
        answer = torch.tensor([all_end, *steps])
        for rank in self._members[1:]:
            if steps[rank] != INACTIVE:
                with suppress(PeerFailedError):
                    transport.wait(transport.isend(answer, rank, Tag.STEPS_OF_ALL))
        return answer

    def _regroup(self, agreement: _Agreement) -> None:
        """Sum among surviving ranks, with new tags that separate messages from earlier ones."""
        self._members = [rank for rank, steps in enumerate(agreement.steps) if steps != INACTIVE]
        self._first_key += self._keys
        self._is_broken = False
        self._all_reduce = self._make()
        self._lose_failed()
        if self._device.type == "cpu":
            # Messages of abandoned sums may still arrive in the memory in which they were added.
            self._totals[self._steps % 2] = self._new_vector()

    def _send_last_sums(self, agreement: _Agreement) -> None:
        """Send the last step's sums to ranks that lack them, if this rank has them first."""
        most = max(agreement.steps)
        if agreement.steps.index(most) != self._transport.rank:
            return
        last = self._totals[(self._steps - 1) % 2]
        lacking = [rank for rank in self._members if agreement.steps[rank] < most]
        for bucket in self._last:
            values = bucket.of(last)
            if not values.is_meta:
                values = values.cpu()
            sends = [self._transport.isend(values, rank, Tag.SUMS) for rank in lacking]
            wait_ended(self._transport, sends)

    def _receive_sums(self, agreement: _Agreement) -> None:
        """Receive this step's sums from the first rank that has them.

        Raises:
            PeerFailedError: that rank has failed.
        """
        holder = agreement.steps.index(max(agreement.steps))
        totals = self._totals[self._steps % 2]
        for bucket in _in_order(self._started):
            total = bucket.of(totals)
            data = total if total.is_cpu or total.is_meta else torch.empty_like(total, device="cpu")
            self._transport.wait(self._transport.irecv(data, holder, Tag.SUMS))
            if data is not total:
                copy(total, data)


class PlainSums:
    """The sums of one step after another over all ranks; the failure of any rank ends them.

    Args:
        residual: of the codec; after a failure its state is that before the step, as the model has
            not changed. None if the codec has none, or if a failure ends the job.
    """

    def __init__(self, all_reduce: AllReduce, ranks: int, residual: Residual | None = None) -> None:
        self._all_reduce = all_reduce
        self._ranks = range(ranks)
        self._residual = residual
        self._started: list[tuple[Bucket, PendingSum]] = []

    def start(self, values: Tensor, bucket: Bucket) -> None:
        """Start summing ``values``, which must not change before :meth:`finish` returns."""
        if self._residual is not None:
            self._residual.keep(bucket, values)
        self._started.append((bucket, self._all_reduce.start(values, bucket.index)))

    def finish(self) -> Sums:
        """Wait for the step's sums."""
        totals = [(bucket, pending.wait()) for bucket, pending in self._started]
        self._started.clear()
        if self._residual is not None:
            self._residual.settle()
        return Sums(totals, self._ranks)

    def settle(self) -> None:
        """End the segment; no rank needs another's sums."""
        return

    def assist(self) -> None:
        """Do nothing: no rank repeats a step's sums."""
        return

    def describe(self) -> str:
        """Return the description of the all-reduce."""
        return self._all_reduce.describe()

    def close(self) -> None:
        """Close the all-reduce."""
        self._all_reduce.close()


def tolerates_failures(name: str, transport: Transport, codec: SumCodec) -> bool:
    """Return whether sums can be repeated: residuals would have changed by then."""
    is_plain = isinstance(codec, DenseWire)
    return is_plain and transport.survives and name in FAULT_TOLERANT_ALLREDUCES


def make_sums(
    name: str,
    transport: Transport,
    new_vector: Callable[[], Tensor],
    device: torch.device,
    codec: SumCodec,
    buckets: Sequence[Bucket],
) -> SurvivingSums | PlainSums:
    """Return sums that tolerate failures, if the transport, the all-reduce and the codec do.

    ``device`` is that of the summed vectors, ``buckets`` are the parts that will be summed, by
    their indices; the other arguments are those of :class:`SurvivingSums`.
    """
    if tolerates_failures(name, transport, codec):
        return SurvivingSums(name, transport, new_vector, codec.plain.dtype, buckets)
    all_reduce = make_all_reduce(name, transport, device, codec, buckets)
    residual = residual_of(codec) if transport.survives else None
    return PlainSums(all_reduce, transport.size, residual)
