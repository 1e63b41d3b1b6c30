"""The sample budget of all workers, kept by rank 0.

It is used up exactly however unequal the workers are: each requests a lease of the samples of its
next step ahead, and the last leases get what is left. Each request carries the report of the
previous step, from which rank 0 computes the metrics.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import log2
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aladdin_mpi.control.tags import COORDINATOR, Tag
from aladdin_mpi.flat.state import Stateful, saved
from aladdin_mpi.transport.base import Request, Transport, numbers_of

MOST_AHEAD = 32
"""Largest number of leases that a worker asks for ahead."""
STOP, CLOSE = -0.5, -0.25
"""In place of a number of samples: end the run, with or without its results."""


FIRST_EXPONENT, LARGEST_EXPONENT = 16, 24
PATIENCE = 2000
"""Steps of all workers without an overflow after which the loss scale is doubled."""


class LossScale(Stateful):
    """Rank 0's scale of losses in half precision, 2 to the power of ``exponent``."""

    SAVED = saved("exponent", "sound", "since")

    def __init__(self) -> None:
        self.exponent = FIRST_EXPONENT
        self.sound = 0  # steps since it was changed
        self.since = 0  # the first sample that was granted after it was halved

    def count(self) -> None:
        """Count a worker's step."""
        self.sound += 1
        if self.sound >= PATIENCE:
            self.exponent = min(self.exponent + 1, LARGEST_EXPONENT)
            self.sound = 0

    def overflowed(self, sample: int, drawn: int) -> bool:
        """Halve the scale after an overflow in the step that began at ``sample``.

        Returns False if that step had the scale before the last halving, which was at ``drawn``
        granted samples.
        """
        if sample < self.since or not self.exponent:
            return False
        self.exponent -= 1
        self.sound, self.since = 0, drawn
        return True


class SampleLease(NamedTuple):
    """The right to ``size`` samples out of a round of ``whole``, number ``start`` and following.

    Without rounds a lease is a round of its own. ``whole`` is 0 when none are left; ``size`` alone
    is 0 for a worker that gets nothing of a last, small round. ``absent`` are the ranks of failed
    workers that take no part in the round, the same for all. ``scale`` is that of losses in half
    precision.
    """

    start: int
    size: int
    whole: int
    absent: tuple[int, ...] = ()
    scale: float = 1.0

    def size_of(self, worker: int, workers: int) -> int:
        """Return a worker's number of the round's samples, dealt as those of an epoch are."""
        return len(range(worker, self.whole, workers))


class WorkerReport(NamedTuple):
    """A worker's report of its last step and of its run so far.

    ``samples`` and ``loss`` (mean over them) are the last step's; 0 samples: there was no step
    since the last report. ``waiting`` (seconds), ``sent`` (bytes) and ``steps`` are totals.
    ``rate`` is the learning rate, if only workers know it.
    """

    samples: int = 0
    loss: float = 0.0
    waiting: float = 0.0
    sent: int = 0
    steps: int = 0
    rate: float | None = None

    def pack(self) -> tuple[float, ...]:
        """Return the report as numbers, without a rate of None."""
        return self[:-1] if self.rate is None else self  # type: ignore[return-value]


class _Round(NamedTuple):
    """A round of all workers, and the ranks among which it is dealt."""

    lease: SampleLease
    workers: list[int]

    def part(self, rank: int) -> SampleLease:
        if rank not in self.workers:
            return self.lease._replace(size=0)
        place = self.workers.index(rank)
        return self.lease._replace(size=self.lease.size_of(place, len(self.workers)))


class Budget:
    """Kept by rank 0. Grants samples up to ``limit``, the end of the current segment.

    Samples granted to a rank that fails are not granted again: their fate is unknown.

    Args:
        total: samples of the whole run.
        on_report: called with (rank, report) for every request.
        lockstep: the ranks that advance in rounds, each round dealt evenly to all of them, so
            that all take as many steps; none: each draws for itself.

    Attributes:
        drawn: samples granted or passed over.
        passed_over: of those drawn, granted to no rank.
        closed_by: the rank that has closed the run; None: none has.
        granted_before: samples granted to each rank before this segment, by a budget of as many
            ranks.
    """

    def __init__(
        self,
        transport: Transport,
        total: int,
        on_report: Callable[[int, WorkerReport], None],
        lockstep: Sequence[int] = (),
    ) -> None:
        self._transport = transport
        self._on_report = on_report
        self.total = total
        self.drawn = 0
        self.passed_over = 0
        self.limit = 0
        self.closed_by: int | None = None
        self.loss_scale = LossScale()
        self._is_open = False
        self._opened = self._passed_over_before = 0
        self._early: list[tuple[int, int]] = []
        self._lockstep = bool(lockstep)
        self._workers = list(lockstep)
        self._absent: list[int] = []
        self._rounds: list[_Round] = []
        self._turns = [0] * transport.size
        self._granted: list[list[int]] = [[] for _ in range(transport.size)]
        self.granted_before = [0] * transport.size
        self._computed = [0] * transport.size
        transport.on_failure(self._lose)
        nbytes = 8 * (1 + len(WorkerReport._fields))
        transport.on_message(Tag.DRAW, nbytes, self._draw, as_numbers=True)

    def _draw(self, source: int, numbers: Sequence[float]) -> None:
        want, samples, loss, waiting, sent, steps, *rate = numbers
        if samples > 0:
            self._computed[source] += 1
            self.loss_scale.count()
        self._on_report(
            source, WorkerReport(int(samples), loss, waiting, int(sent), int(steps), *rate)
        )
        if want == STOP:
            self.total = self.limit = self.drawn
        elif want == CLOSE:
            self.closed_by = source
            self.stop()
        elif want < 0:
            before, self.drawn = self.drawn, max(self.drawn, min(int(-want), self.total))
            self.passed_over += self.drawn - before
        if want > 0 and self._is_open:
            self._grant(source, int(want))
        elif want > 0:
            self._early.append((source, int(want)))

    def _grant(self, rank: int, want: int) -> None:
        lease = self._part_of_round(rank, want) if self._lockstep else self._take(want)
        if lease.size:
            self._granted[rank].append(lease.size)
        numbers = (*lease[:3], log2(lease.scale), *lease.absent)
        self._transport.isend(numbers, rank, Tag.GRANT)

    def _take(self, want: int) -> SampleLease:
        count = min(want, max(self.limit - self.drawn, 0))
        self.drawn += count
        scale = 2.0**self.loss_scale.exponent
        return SampleLease(self.drawn - count, count, count, scale=scale)

    def _part_of_round(self, rank: int, want: int) -> SampleLease:
        """Return a worker's part of its next round, which the first request for it decides."""
        turn = self._turns[rank]
        self._turns[rank] += 1
        if turn == len(self._rounds):
            workers = list(self._workers)
            lease = self._take(want * len(workers))._replace(absent=tuple(self._absent))
            self._rounds.append(_Round(lease, workers))
        return self._rounds[turn].part(rank)

    def _lose(self, rank: int) -> None:
        """Grant no more to a rank that has failed; its parts of rounds already dealt are lost."""
        self._early = [draw for draw in self._early if draw[0] != rank]
        if rank in self._workers:
            rest = [decided.part(rank).size for decided in self._rounds[self._turns[rank] :]]
            self._granted[rank] += [size for size in rest if size]
            self._workers.remove(rank)
            self._absent.append(rank)

    def computed(self, rank: int) -> int:
        """Return the steps that a rank has reported in this segment."""
        return self._computed[rank]

    def lost(self, rank: int, steps: int) -> int:
        """Return the samples granted to a rank in this segment after its first ``steps`` steps."""
        return sum(self._granted[rank][steps:])

    @property
    def granted(self) -> list[int]:
        """Samples granted to each rank, in this segment and before it."""
        in_segment = map(sum, self._granted)
        return [sum(both) for both in zip(self.granted_before, in_segment, strict=True)]

    def begin_at(self, drawn: int, passed_over: int) -> None:
        """Continue after ``drawn`` samples, of which ``passed_over`` were."""
        self.drawn = self._opened = drawn
        self.passed_over = self._passed_over_before = passed_over

    def in_flight(self) -> dict[str, Any]:
        """Return the present segment's samples granted to and reported by each rank."""
        return {
            "opened": self._opened,
            "granted": list(map(sum, self._granted)),
            "computed": [
                sum(sizes[:steps])
                for sizes, steps in zip(self._granted, self._computed, strict=True)
            ],
            "total": self.total,
            "passed_over": self.passed_over - self._passed_over_before,
        }

    def open(self, limit: int) -> None:
        """Grant samples up to number ``limit`` of the run, first to early requests."""
        with self._transport.atomic():
            self.limit, self._is_open = min(limit, self.total), True
            self._opened, self._passed_over_before = self.drawn, self.passed_over
            self.granted_before = self.granted
            self._rounds.clear()
            self._turns = [0] * len(self._turns)
            self._granted = [[] for _ in self._turns]
            self._computed = [0] * len(self._turns)
            for rank in sorted(self._transport.failed):
                self._lose(rank)  # also one that had failed before there was a budget
            for rank, want in self._early:
                self._grant(rank, want)
            self._early.clear()

    def close(self) -> None:
        """End the segment on every rank: requests from now on are for the next one."""
        self._is_open = False

    def stop(self) -> None:
        """Grant nothing more: the segment ends when the granted samples are used."""
        self.limit = self.drawn

    @property
    def used_up(self) -> bool:
        """Whether every sample of the run has been drawn."""
        return self.drawn >= self.total


class SampleClient:
    """A worker's side of the budget."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._grants: deque[Request] = deque()
        self._free: list[Tensor] = []  # buffers of grants, as long as the ranks are many
        self._ahead = 1
        self._computing = False

    def open(self) -> None:
        """Begin a segment."""
        self._ahead = 1
        self._computing = False

    @property
    def short(self) -> int:
        """Leases to request now: one ahead, twice as many each time that one came too late."""
        return self._ahead - len(self._grants)

    @property
    def outstanding(self) -> int:
        """Leases that have been requested and not been taken."""
        return len(self._grants)

    def request(self, want: int, report: WorkerReport) -> None:
        """Request ``want`` samples, and report; :meth:`take` returns the answer."""
        numbers = 4 + self._transport.size
        grant = self._free.pop() if self._free else torch.empty(numbers, dtype=torch.float64)
        self._grants.append(self._transport.irecv(grant, COORDINATOR, Tag.GRANT))
        self._send(want, report)

    def report(self, report: WorkerReport) -> None:
        """Report and request nothing."""
        self._send(0, report)

    def stop(self) -> None:
        """Request that nothing more is granted to any worker, and the run ends."""
        self._send(STOP, WorkerReport())

    def close_run(self) -> None:
        """Request that nothing more is granted to any worker, and the run ends without results."""
        self._send(CLOSE, WorkerReport())

    def pass_over(self, samples: int) -> None:
        """Request that nothing before number ``samples`` is granted any more."""
        self._send(-samples, WorkerReport())

    def _send(self, want: float, report: WorkerReport) -> None:
        self._transport.isend((want, *report.pack()), COORDINATOR, Tag.DRAW)

    def take(self) -> SampleLease:
        """Return the first lease requested; waits until it has arrived."""
        receive = self._grants.popleft()
        if not self._transport.test(receive):
            # A segment's first lease cannot have come: that is no sign of a slow network.
            if self._computing:
                self._ahead = min(2 * self._ahead, MOST_AHEAD)
            self._transport.wait(receive)
        self._computing = True
        start, size, whole, exponent, *absent = numbers_of(receive)
        assert receive.buffer is not None
        self._free.append(receive.buffer)
        return SampleLease(
            int(start), int(size), int(whole), tuple(map(int, absent)), 2.0**exponent
        )
