"""Sums that outlast the death of ranks: those that live repeat the step that was under way.

A rank may have all sums of a step when another learns, in the middle of them, that a third has
died. Neither can be more than one step ahead of the other, since every sum needs both. So the
living tell rank 0 how many steps they have completed. Where one has the step that others lack, it
sends them its sums, with the dead rank's gradients in them; where none has, all sum again, without
the dead. In either case every one of them goes on with the same bits.

Until the first death the engine's collectives may add up. They need all ranks, so after it
messages do.
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
from aladdin_mpi.control.tags import COORDINATOR, Tag, of_generation
from aladdin_mpi.errors import PeerFailedError
from aladdin_mpi.flat.layout import Bucket, Layout
from aladdin_mpi.flat.vectors import copy
from aladdin_mpi.transport.base import Transport, wait_ended
from aladdin_mpi.transport.group import PartOfRanks

GONE = -1
"""In place of a rank's number of steps: it takes no part any more."""


class Sums(NamedTuple):
    """A step's sums: one for each bucket, over the vectors of ``ranks``."""

    totals: list[tuple[Bucket, Tensor]]
    ranks: Sequence[int]


class _Begun(NamedTuple):
    """``values`` is the rank's own part, ``pending`` None where the sum could not begin."""

    bucket: Bucket
    values: Tensor
    pending: PendingSum | None


class _Agreed(NamedTuple):
    """``steps`` that each rank has completed, by rank; ``all_end``: no one lacks any."""

    steps: list[int]
    all_end: bool


class SurvivingSums:
    """The sums of one step after another, all buckets of a step or none.

    Every rank of ``transport`` takes part, rank 0 to the end. ``new_vector`` makes a flat vector
    where the gradients live; two are needed.
    """

    def __init__(
        self,
        name: str,
        transport: Transport,
        layout: Layout,
        new_vector: Callable[[], Tensor],
        wire_dtype: torch.dtype,
    ) -> None:
        self._name = name
        self._transport = transport
        self._layout = layout
        self._wire_dtype = wire_dtype
        # Of two steps, since the sums of the last one may be asked for while the next is under way.
        self._totals = [new_vector(), new_vector()]
        self._device = self._totals[0].device
        self._members = list(range(transport.size))
        self._generation = 0
        self._steps = 0
        self._begun: list[_Begun] = []
        self._is_broken = False
        self._all_reduce = self._make()
        transport.on_failure(self._lose)

    def _make(self) -> AllReduce:
        transport, dtype = self._transport, self._wire_dtype
        if len(self._members) == transport.size:
            return choose.by_transport(self._name, transport, self._device, dtype)
        part = PartOfRanks(transport, self._members)
        if dtype != torch.bfloat16:
            return RingAllReduce(part, self._device, dtype, self._generation)
        return DirectAllReduce(part, self._device, dtype, of_generation(self._generation))

    def describe(self) -> str:
        """What adds up, in a few words."""
        return f"{self._all_reduce.describe()}; among those that live if workers die"

    def close(self) -> None:
        """See :meth:`AllReduce.close`."""
        self._all_reduce.close()

    # -- a step ---------------------------------------------------------------------------
    def start(self, values: Tensor, bucket: Bucket) -> None:
        """Begin to sum ``values``, which must stay as they are until :meth:`finish` has the sum."""
        pending = None
        if not self._is_broken:
            total = bucket.of(self._totals[self._steps % 2])
            copy(total, values)
            try:
                pending = self._all_reduce.start(total, bucket.index)
            except PeerFailedError:  # not out of backward: finish() sees to it
                self._is_broken = True
        self._begun.append(_Begun(bucket, values, pending))

    def finish(self) -> Sums:
        """Wait for the step's sums, which are put into the values that were given to be summed."""
        has_sums, ranks = False, self._members
        while not has_sums:
            ranks = self._members
            try:
                self._complete()
                has_sums = True
            except PeerFailedError:
                has_sums = self._recover()
        totals = self._totals[self._steps % 2]
        summed = [(bucket, values) for bucket, values, _ in self._begun]
        for bucket, values in summed:
            copy(values, bucket.of(totals))
        self._steps += 1
        self._begun.clear()
        return Sums(summed, ranks)

    def _complete(self) -> None:
        """Wait for all sums.

        Raises:
            PeerFailedError: a rank died before all had come.
        """
        dead = self._transport.failed.intersection(self._members)
        if self._is_broken or dead:
            raise PeerFailedError(min(dead, default=COORDINATOR), "")
        totals = self._totals[self._steps % 2]
        for bucket, _, pending in self._begun:
            assert pending is not None
            result, total = pending.wait(), bucket.of(totals)
            if result.data_ptr() != total.data_ptr():
                copy(total, result)

    def settle(self) -> None:
        """The segment is over for this rank: stay until no one needs its sums any more."""
        agreed = self._agree(is_at_end=True)
        while not agreed.all_end:
            self._regroup(agreed)
            self._give(agreed)
            agreed = self._agree(is_at_end=True)

    # -- after a death ----------------------------------------------------------------------
    def _lose(self, rank: int) -> None:
        """Also a sum with the living is left: they may have left it."""
        if rank in self._members:
            self._all_reduce.abandon(rank)

    def _recover(self) -> bool:
        """Go on without the dead; whether another rank had this step's sums."""
        while True:
            agreed = self._agree(is_at_end=False)
            self._regroup(agreed)
            try:
                if max(agreed.steps) > self._steps:
                    self._take(agreed)
                    return True
            except PeerFailedError:
                continue  # who had them has died as well
            self._give(agreed)
            self._begin_again()
            return False

    def _begin_again(self) -> None:
        begun, self._begun = self._begun, []
        for bucket, values, _ in begun:
            self.start(values, bucket)

    def _agree(self, is_at_end: bool) -> _Agreed:
        """What rank 0 has been told by all that live."""
        mine = torch.tensor([self._steps, is_at_end])
        answer = torch.zeros(1 + self._transport.size, dtype=torch.int64)
        if self._transport.rank == COORDINATOR:
            answer = self._gather(mine)
        else:
            self._transport.wait(self._transport.isend(mine, COORDINATOR, Tag.STEPS))
            self._transport.wait(self._transport.irecv(answer, COORDINATOR, Tag.STEPS_OF_ALL))
        all_end, *steps = answer.tolist()
        return _Agreed(steps, bool(all_end))

    def _gather(self, mine: Tensor) -> Tensor:
        """At rank 0: everyone's report, given to all."""
        transport = self._transport
        steps = [GONE] * transport.size
        steps[COORDINATOR], all_end = mine.tolist()
        for rank in self._members[1:]:
            report = torch.zeros_like(mine)
            with suppress(PeerFailedError):
                transport.wait(transport.irecv(report, rank, Tag.STEPS))
                steps[rank] = int(report[0])
                all_end = min(all_end, int(report[1]))
        answer = torch.tensor([all_end, *steps])
        for rank in self._members[1:]:
            if steps[rank] != GONE:
                with suppress(PeerFailedError):
                    transport.wait(transport.isend(answer, rank, Tag.STEPS_OF_ALL))
        return answer

    def _regroup(self, agreed: _Agreed) -> None:
        """Sum among those that live, apart from what was sent before."""
        self._members = [rank for rank, steps in enumerate(agreed.steps) if steps != GONE]
        self._generation += 1
        self._is_broken = False
        self._all_reduce = self._make()

    def _give(self, agreed: _Agreed) -> None:
        """Send the last step's sums to those that lack them, if that is this rank's to do."""
        most = max(agreed.steps)
        if agreed.steps.index(most) != self._transport.rank:
            return
        last = self._totals[(self._steps - 1) % 2]
        lacking = [rank for rank in self._members if agreed.steps[rank] < most]
        for bucket in self._layout.buckets:
            values = bucket.of(last)
            if not values.is_meta:
                values = values.cpu()
            sends = [self._transport.isend(values, rank, Tag.SUMS) for rank in lacking]
            wait_ended(self._transport, sends)

    def _take(self, agreed: _Agreed) -> None:
        """Receive this step's sums from the first rank that has them.

        Raises:
            PeerFailedError: it has died.
        """
        holder = agreed.steps.index(max(agreed.steps))
        totals = self._totals[self._steps % 2]
        for bucket in self._layout.buckets:
            total = bucket.of(totals)
            room = total if total.is_cpu or total.is_meta else torch.empty_like(total, device="cpu")
            self._transport.wait(self._transport.irecv(room, holder, Tag.SUMS))
            if room is not total:
                copy(total, room)
