"""The budget of samples that all workers draw from, kept by rank 0.

A budget is used up exactly however unequal the workers are: each draws the samples
of its next step, one step ahead, and the last draws get what is left. With a draw
a worker reports on its last step, which is all that metrics need to travel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from aladdin_mpi.tags import Tag
from aladdin_mpi.transport.base import Request, Transport

KEEPER = 0
"""The rank that keeps the budget."""


class Ticket(NamedTuple):
    """The right to ``size`` samples, number ``start`` of the run and following; 0: none left."""

    start: int
    size: int


class Report(NamedTuple):
    """What a worker says of its last step and of its run so far.

    ``samples`` and ``loss`` (mean over them) are the last step's; 0 samples: there
    was no step since the last report. ``waiting`` (seconds), ``sent`` (bytes) and
    ``steps`` are totals.
    """

    samples: int = 0
    loss: float = 0.0
    waiting: float = 0.0
    sent: int = 0
    steps: int = 0


class Budget:
    """Kept by rank 0. Grants samples up to ``limit``, the end of the current segment.

    Args:
        total: samples of the whole run.
        on_report: called with (rank, report, samples drawn) for every draw.
    """

    def __init__(
        self, transport: Transport, total: int, on_report: Callable[[int, Report], None]
    ) -> None:
        self._transport = transport
        self._on_report = on_report
        self.total = total
        self.drawn = 0
        self.limit = 0
        nbytes = 8 * (1 + len(Report._fields))
        transport.on_message(Tag.DRAW, nbytes, self._draw)

    def _draw(self, source: int, message: Tensor) -> None:
        want, samples, loss, waiting, sent, steps = message.view(torch.float64).tolist()
        self._on_report(source, Report(int(samples), loss, waiting, int(sent), int(steps)))
        if want < 0:
            self.total = self.limit = self.drawn
        if want > 0:
            count = min(int(want), max(self.limit - self.drawn, 0))
            grant = torch.tensor([self.drawn, count])
            self.drawn += count
            self._transport.isend(grant, source, Tag.GRANT)

    def open(self, limit: int) -> None:
        """Grant samples up to number ``limit`` of the run."""
        self.limit = min(limit, self.total)

    def stop(self) -> None:
        """Grant nothing more: the segment ends when what was drawn is used."""
        self.limit = self.drawn

    @property
    def used_up(self) -> bool:
        """Whether every sample of the run has been drawn."""
        return self.drawn >= self.total


class Draws:
    """A worker's side of the budget."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._grant = torch.zeros(2, dtype=torch.int64)
        self._receive: Request | None = None

    def request(self, want: int, report: Report) -> None:
        """Ask for ``want`` samples, and report; :meth:`take` gets the answer."""
        self._receive = self._transport.irecv(self._grant, KEEPER, Tag.GRANT)
        self._send(want, report)

    def report(self, report: Report) -> None:
        """Report and ask for nothing."""
        self._send(0, report)

    def stop(self) -> None:
        """Ask that nothing more is granted to any worker, and the run ends."""
        self._send(-1, Report())

    def _send(self, want: int, report: Report) -> None:
        message = torch.tensor([want, *report], dtype=torch.float64)
        self._transport.isend(message, KEEPER, Tag.DRAW)

    def take(self) -> Ticket:
        """The ticket asked for; waits for it if it has not come."""
        assert self._receive is not None, "take() without request()"
        self._transport.wait(self._receive)
        self._receive = None
        start, count = self._grant.tolist()
        return Ticket(start, count)
