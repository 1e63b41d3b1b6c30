"""The sample budget of all workers, managed by rank 0.

It is used up exactly, whatever the workers' speeds: each worker requests leases of the samples of
its next steps ahead, and the last leases get the rest. Each request carries the report of the
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
"""Largest number of leases that a worker requests ahead."""
LEASE_NUMBERS = 4
"""Number of values in a message with a sample lease, besides the ranks that have failed."""
STOP, CLOSE, PAUSE = -0.5, -0.25, -0.125
"""Replace a number of samples: end the run, with or without its results; end the segment."""


FIRST_EXPONENT, LARGEST_EXPONENT = 16, 24
PATIENCE = 2000
"""Steps of all workers without an overflow after which the loss scale is doubled."""


class LossScale(Stateful):
    """Rank 0's scale of losses in half precision, 2 to the power of ``exponent``."""

    SAVED = saved("exponent", "since", sound="steps")

    def __init__(self) -> None:
        self.exponent = FIRST_EXPONENT
        self.steps = 0  # since the last change
        self.since = 0  # first sample granted after the last halving

    def count(self) -> None:
        """Count a worker's step."""
        self.steps += 1
        if self.steps >= PATIENCE:
            self.exponent = min(self.exponent + 1, LARGEST_EXPONENT)
            self.steps = 0

    def overflowed(self, sample: int, drawn: int) -> bool:
        """Halve the scale after an overflow in the step that started at ``sample``.

        Returns False if that step used the scale before the last halving. ``drawn`` is the number
        of granted samples.
        """
        if sample < self.since or not self.exponent:
            return False
        self.exponent -= 1
        self.steps, self.since = 0, drawn
        return True


class SampleLease(NamedTuple):
    """The right to ``size`` samples out of a round of ``whole``, from number ``start`` on.

    Without rounds a lease is a round by itself. ``whole`` is 0 after the last sample; only
    ``size`` is 0 for a worker without samples in a small last round. ``absent`` are the ranks of
    failed workers that take no part in the round. ``scale`` is that of losses in half precision.
    All sizes are multiples of ``unit``.
    """

    start: int
    size: int
    whole: int
    absent: tuple[int, ...] = ()
    scale: float = 1.0
    unit: int = 1

    def pack(self) -> tuple[float, ...]:
        """Return the lease as numbers, without its unit."""
        return (self.start, self.size, self.whole, log2(self.scale), *self.absent)

    def size_of(self, worker: int, workers: int) -> int:
        """Return a worker's number of the round's samples, divided like those of an epoch."""
        return self.unit * len(range(worker, self.whole // self.unit, workers))


class WorkerReport(NamedTuple):
    """A worker's report of its last step and of its run so far.

    ``samples`` and ``loss`` (mean over them) are those of the last step; 0 samples: no step since
    the last report. ``waiting`` (seconds), ``sent`` (bytes) and ``steps`` are totals.
    ``rate`` is the learning rate, if only workers know it.
    """

    samples: int = 0
    loss: float = 0.0
    waiting: float = 0.0
    sent: int = 0
    steps: int = 0
    rate: float | None = None

    def pack(self) -> tuple[float, ...]:
        """Return the report as numbers, omitting a rate of None."""
        return self[:-1] if self.rate is None else self  # type: ignore[return-value]


class _Round(NamedTuple):
    """A round of all workers, and the ranks among which it is divided."""

    lease: SampleLease
    workers: list[int]

    def part(self, rank: int) -> SampleLease:
        if rank not in self.workers:
            return self.lease._replace(size=0)
        place = self.workers.index(rank)
        return self.lease._replace(size=self.lease.size_of(place, len(self.workers)))


class Budget:
    """Rank 0's budget, which grants samples up to ``limit``, the end of the current segment.

    Samples granted to a rank that fails are not granted again: their use is unknown.

    Args:
        total: samples of the whole run.
        on_report: called with (rank, report) for every request.
        lockstep: the ranks that advance in rounds, each round divided evenly among all of them,
            so that all take the same number of steps; empty: each draws separately.
        unit: leases have multiples of this number of samples; a smaller rest of a segment is
            passed over.

    Attributes:
        drawn: samples granted or passed over.
        passed_over: number of those drawn that were granted to no rank.
        closed_by: the rank that has closed the run; None: not closed.
        granted_before: samples granted to each rank before this segment, with the same number of
            ranks.
    """

    def __init__(
        self,
        transport: Transport,
        total: int,
        on_report: Callable[[int, WorkerReport], None],
        lockstep: Sequence[int] = (),
        unit: int = 1,
    ) -> None:
        self._transport = transport
        self._on_report = on_report
        self._unit = unit
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
        elif want == PAUSE:
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
        self._transport.isend(lease.pack(), rank, Tag.GRANT)

    def _take(self, want: int) -> SampleLease:
        rest = max(self.limit - self.drawn, 0)
        if rest < self._unit:
            self.drawn += rest
            self.passed_over += rest
            rest = 0
        count = min(want, rest - rest % self._unit)
        self.drawn += count
        scale = 2.0**self.loss_scale.exponent
        return SampleLease(self.drawn - count, count, count, scale=scale, unit=self._unit)

    def _part_of_round(self, rank: int, want: int) -> SampleLease:
        """Return a worker's part of its next round, which the first request determines."""
        turn = self._turns[rank]
        self._turns[rank] += 1
        if turn == len(self._rounds):
            workers = list(self._workers)
            lease = self._take(want * len(workers))._replace(absent=tuple(self._absent))
            self._rounds.append(_Round(lease, workers))
        return self._rounds[turn].part(rank)

    def _lose(self, rank: int) -> None:
        """Stop granting to a failed rank; its parts of rounds already divided are lost."""
        self._early = [draw for draw in self._early if draw[0] != rank]
        if rank in self._workers:
            rest = [round_.part(rank).size for round_ in self._rounds[self._turns[rank] :]]
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
        """Continue after ``drawn`` samples, of which ``passed_over`` were passed over."""
        self.drawn = self._opened = drawn
        self.passed_over = self._passed_over_before = passed_over

    def in_flight(self) -> dict[str, Any]:
        """Return the current segment's samples granted to and reported by each rank."""
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
        """Start a segment up to sample number ``limit``; grant early requests first."""
        with self._transport.atomic():
            self.limit, self._is_open = min(limit, self.total), True
            self._opened, self._passed_over_before = self.drawn, self.passed_over
            self.granted_before = self.granted
            self._rounds.clear()
            self._turns = [0] * len(self._turns)
            self._granted = [[] for _ in self._turns]
            self._computed = [0] * len(self._turns)
            for rank in sorted(self._transport.failed):
                self._lose(rank)  # it may have failed before this budget existed
            for rank, want in self._early:
                self._grant(rank, want)
            self._early.clear()

    def close(self) -> None:
        """End the segment on every rank: requests from now on belong to the next one."""
        self._is_open = False

    def stop(self) -> None:
        """Grant nothing more: the segment ends when the granted samples are used."""
        self.limit = self.drawn

    def stop_after(self, rounds: int) -> None:
        """Grant only up to the next multiple of ``rounds`` rounds of this segment.

        A failure changes a round's samples, so call it again with each report.
        """
        missing = -len(self._rounds) % rounds
        whole = self._rounds[-1].lease.whole if missing else 0
        self.limit = min(self.limit, self.drawn + missing * whole)

    @property
    def used_up(self) -> bool:
        """Whether every sample of the run has been drawn."""
        return self.drawn >= self.total


class SampleClient:
    """A worker's side of the budget, whose leases have multiples of ``unit`` samples."""

    def __init__(self, transport: Transport, unit: int = 1) -> None:
        self._transport = transport
        self._unit = unit
        self._grants: deque[Request] = deque()
        self._free: list[Tensor] = []  # buffers of grants, whose length depends on the ranks
        self._ahead = 1
        self._computing = False

    def open(self) -> None:
        """Start a segment."""
        self._ahead = 1
        self._computing = False

    @property
    def short(self) -> int:
        """Number of leases to request now: one ahead, doubled each time that one came too late."""
        return self._ahead - len(self._grants)

    @property
    def outstanding(self) -> int:
        """Number of leases that have been requested but not taken."""
        return len(self._grants)

    def request(self, want: int, report: WorkerReport) -> None:
        """Request ``want`` samples, and report; :meth:`take` returns the answer."""
        numbers = LEASE_NUMBERS + self._transport.size
        grant = self._free.pop() if self._free else torch.empty(numbers, dtype=torch.float64)
        self._grants.append(self._transport.irecv(grant, COORDINATOR, Tag.GRANT))
        self._send(want, report)

    def report(self, report: WorkerReport) -> None:
        """Report and request nothing."""
        self._send(0, report)

    def stop(self) -> None:
        """Request the end of the run: no more samples are granted to any worker."""
        self._send(STOP, WorkerReport())

    def close_run(self) -> None:
        """Request the end of the run without results: no more samples are granted."""
        self._send(CLOSE, WorkerReport())

    def end_segment(self) -> None:
        """Request the end of the segment: no more samples are granted before the next one."""
        self._send(PAUSE, WorkerReport())

    def pass_over(self, samples: int) -> None:
        """Request that samples before number ``samples`` are not granted any more."""
        self._send(-samples, WorkerReport())

    def _send(self, want: float, report: WorkerReport) -> None:
        self._transport.isend((want, *report.pack()), COORDINATOR, Tag.DRAW)

    def take(self) -> SampleLease:
        """Wait for the first requested lease and return it."""
        receive = self._grants.popleft()
        if self._transport.is_revoked():  # a worker that never waits would not notice it
            self._transport.wait(receive)
        if not self._transport.test(receive):
            # A segment's first lease cannot have arrived, so it does not indicate a slow network.
            if self._computing:
                self._ahead = min(2 * self._ahead, MOST_AHEAD)
            self._transport.wait(receive)
        self._computing = True
        lease = self._lease(receive)
        assert receive.buffer is not None
        self._free.append(receive.buffer)
        return lease

    def _lease(self, receive: Request) -> SampleLease:
        """Return the lease that was received as :meth:`SampleLease.pack`."""
        start, size, whole, exponent, *absent = numbers_of(receive)
        ranks = tuple(map(int, absent))
        return SampleLease(int(start), int(size), int(whole), ranks, 2.0**exponent, self._unit)
