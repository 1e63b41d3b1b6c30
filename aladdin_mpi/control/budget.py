"""The budget of samples that all workers draw from, kept by rank 0.

A budget is used up exactly however unequal the workers are: each draws the samples
of its next step, one step ahead, and the last draws get what is left. With a draw
a worker reports on its last step, which is all that metrics need to travel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import log2
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aladdin_mpi.control.refusals import LossScale
from aladdin_mpi.control.tags import COORDINATOR, Tag
from aladdin_mpi.transport.base import Request, Transport, numbers_of

MOST_AHEAD = 32
"""Largest number of leases that a worker asks for ahead."""
STOP = -0.5
"""In place of a number of samples: end the run."""
CLOSE = -0.25
"""In place of a number of samples: end the run without its results."""


class SampleLease(NamedTuple):
    """The right to ``size`` samples out of a round of ``whole``, number ``start`` and following.

    Without rounds a lease is a round of its own. ``whole`` is 0 when none are left;
    ``size`` alone is 0 for a worker that gets nothing of a last, small round. ``absent``
    are the ranks of failed workers that take no part in the round, the same for all. ``scale`` is
    that of losses in half precision.
    """

    start: int
    size: int
    whole: int
    absent: tuple[int, ...] = ()
    scale: float = 1.0

    def size_of(self, worker: int, workers: int) -> int:
        """Return how many of the round's samples a worker gets.

        The first workers get one more than the others, as they do of an epoch
        (:class:`aladdin_mpi.data.sampler.ShardedStream`).
        """
        return len(range(worker, self.whole, workers))


class WorkerReport(NamedTuple):
    """What a worker says of its last step and of its run so far.

    ``samples`` and ``loss`` (mean over them) are the last step's; 0 samples: there
    was no step since the last report. ``waiting`` (seconds), ``sent`` (bytes) and
    ``steps`` are totals. ``rate`` is the learning rate, where only workers know it.
    """

    samples: int = 0
    loss: float = 0.0
    waiting: float = 0.0
    sent: int = 0
    steps: int = 0
    rate: float | None = None

    def pack(self) -> tuple[float, ...]:
        """As numbers, less a rate that there is not."""
        return self[:-1] if self.rate is None else self  # type: ignore[return-value]


class _Round(NamedTuple):
    """A round of all workers, and those among whom it is dealt."""

    lease: SampleLease
    workers: list[int]

    def part(self, rank: int) -> SampleLease:
        if rank not in self.workers:
            return self.lease._replace(size=0)
        place = self.workers.index(rank)
        return self.lease._replace(size=self.lease.size_of(place, len(self.workers)))


class Budget:
    """Kept by rank 0. Grants samples up to ``limit``, the end of the current segment.

    What was granted to a rank that fails is not granted again: nobody can say what
    became of it.

    Args:
        total: samples of the whole run.
        on_report: called with (rank, report, samples drawn) for every draw.
        lockstep: the ranks that advance in rounds, each round dealt evenly to all of them, so
            that every one takes as many steps; none: each draws for itself.
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
        """Of those drawn: granted to nobody."""
        self.limit = 0
        self.closed_by: int | None = None
        """The rank that has closed the run; None: none has."""
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
        """Samples granted to each rank before this segment, by a budget of as many ranks."""
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
            self._pass_over(int(-want))
        if want > 0 and self._is_open:
            self._grant(source, int(want))
        elif want > 0:
            self._early.append((source, int(want)))

    def _pass_over(self, samples: int) -> None:
        """Grant nothing before number ``samples`` any more."""
        before, self.drawn = self.drawn, max(self.drawn, min(samples, self.total))
        self.passed_over += self.drawn - before

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
        """The worker's part of its next round, which is decided when the first one asks."""
        turn = self._turns[rank]
        self._turns[rank] += 1
        if turn == len(self._rounds):
            workers = list(self._workers)
            lease = self._take(want * len(workers))._replace(absent=tuple(self._absent))
            self._rounds.append(_Round(lease, workers))
        return self._rounds[turn].part(rank)

    def _lose(self, rank: int) -> None:
        """Deal no more to a rank that has failed; its parts of rounds that are dealt are lost."""
        self._early = [draw for draw in self._early if draw[0] != rank]
        if rank in self._workers:
            rest = [decided.part(rank).size for decided in self._rounds[self._turns[rank] :]]
            self._granted[rank] += [size for size in rest if size]
            self._workers.remove(rank)
            self._absent.append(rank)

    def computed(self, rank: int) -> int:
        """Steps that a rank has reported in this segment."""
        return self._computed[rank]

    def lost(self, rank: int, steps: int) -> int:
        """Samples granted to a rank in this segment beyond those of its first ``steps`` steps."""
        return sum(self._granted[rank][steps:])

    @property
    def granted(self) -> list[int]:
        """Samples granted to each rank, in this segment and before it."""
        return [
            before + sum(sizes)
            for before, sizes in zip(self.granted_before, self._granted, strict=True)
        ]

    def begin_at(self, drawn: int, passed_over: int) -> None:
        """Go on where so many samples had been drawn, and so many of them passed over."""
        self.drawn = self._opened = drawn
        self.passed_over = self._passed_over_before = passed_over

    def in_flight(self) -> dict[str, Any]:
        """Of the present segment: what each rank was granted and has reported, and its limit."""
        return {
            "opened": self._opened,
            "granted": [sum(sizes) for sizes in self._granted],
            "computed": [
                sum(sizes[:steps])
                for sizes, steps in zip(self._granted, self._computed, strict=True)
            ],
            "total": self.total,
            "passed_over": self.passed_over - self._passed_over_before,
        }

    def open(self, limit: int) -> None:
        """Grant samples up to number ``limit`` of the run, first to those who came too early."""
        with self._transport.atomic():
            self.limit, self._is_open = min(limit, self.total), True
            self._opened, self._passed_over_before = self.drawn, self.passed_over
            self.granted_before = self.granted
            self._rounds.clear()
            self._turns = [0] * len(self._turns)
            self._granted = [[] for _ in self._turns]
            self._computed = [0] * len(self._turns)
            for rank in sorted(self._transport.failed):
                self._lose(rank)  # also who had failed before there was a budget
            for rank, want in self._early:
                self._grant(rank, want)
            self._early.clear()

    def close(self) -> None:
        """The segment is over on every rank: who draws now means the next one."""
        self._is_open = False

    def stop(self) -> None:
        """Grant nothing more: the segment ends when what was drawn is used."""
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
        self._free: list[Tensor] = []
        """Buffers of grants: one is as long as the ranks are many."""
        self._ahead = 1
        self._computing = False

    def open(self) -> None:
        """Begin a segment."""
        self._ahead = 1
        self._computing = False

    @property
    def short(self) -> int:
        """How many leases should be asked for now.

        One is asked for ahead; twice as many each time that one came too late.
        """
        return self._ahead - len(self._grants)

    @property
    def outstanding(self) -> int:
        """How many leases have been asked for and not been taken."""
        return len(self._grants)

    def request(self, want: int, report: WorkerReport) -> None:
        """Ask for ``want`` samples, and report; :meth:`take` gets the answer."""
        numbers = 4 + self._transport.size
        grant = self._free.pop() if self._free else torch.empty(numbers, dtype=torch.float64)
        self._grants.append(self._transport.irecv(grant, COORDINATOR, Tag.GRANT))
        self._send(want, report)

    def report(self, report: WorkerReport) -> None:
        """Report and ask for nothing."""
        self._send(0, report)

    def stop(self) -> None:
        """Ask that nothing more is granted to any worker, and the run ends."""
        self._send(STOP, WorkerReport())

    def close_run(self) -> None:
        """Ask that nothing more is granted to any worker, and the run ends without results."""
        self._send(CLOSE, WorkerReport())

    def pass_over(self, samples: int) -> None:
        """Ask that nothing before number ``samples`` is granted any more."""
        self._send(-samples, WorkerReport())

    def _send(self, want: float, report: WorkerReport) -> None:
        self._transport.isend((want, *report.pack()), COORDINATOR, Tag.DRAW)

    def take(self) -> SampleLease:
        """The first lease asked for; waits for it if it has not come."""
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
