"""Copies of rank 0's state of the run, sent to a standby coordinator on another host."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.control.budget import WorkerReport
from aladdin_mpi.control.exchange import packed, unpacked
from aladdin_mpi.control.tags import COORDINATOR, Tag
from aladdin_mpi.session.coordinator import Coordinator, RunHook
from aladdin_mpi.transport.base import Request, Transport, surviving_ranks

EVERY = 8
"""Workers' reports between two copies, ..."""
PAUSE = 0.05
"""... and minimum seconds between them: a copy takes a third of a millisecond."""
MOST_BYTES = 1 << 22
"""Of a copy with the names of tens of thousands of skipped images; others have a few hundred."""


class Standby(RunHook):
    """A hook that sends or receives copies, unless the failure of a rank ends the job.

    All ranks listen, as any of them may become the standby coordinator. ``mates`` are the other
    members of rank 0's island, which leave the run with it.
    """

    def __init__(self, transport: Transport, mates: Collection[int] = ()) -> None:
        self._transport = transport
        self._mates = mates
        self._reports, self._sent_at = 0, 0.0
        self._newest: Tensor | None = None
        self._received_at = 0.0
        if not transport.survives:
            return
        transport.exclude_from_traffic(Tag.STANDBY)
        if transport.rank != COORDINATOR:
            self._listen()

    def _listen(self) -> None:
        buffer = torch.empty(MOST_BYTES, dtype=torch.uint8)
        request = self._transport.irecv(buffer, COORDINATOR, Tag.STANDBY)
        self._transport.when_done(request, lambda: self._take(request))

    def _take(self, request: Request) -> None:
        if request.failed is None and request.nbytes and request.buffer is not None:
            self._newest = request.buffer[: request.nbytes]
            self._received_at = self._transport.now()
            self._listen()

    @property
    def copy(self) -> dict[str, Any] | None:
        """The newest copy, at a rank that is or was the standby; None elsewhere.

        Its ``seconds`` are advanced to the present, as training has continued.
        """
        if self._newest is None:
            return None
        knowledge: dict[str, Any] = unpacked(self._newest)
        if knowledge["is_open"]:
            knowledge["seconds"] += self._transport.now() - self._received_at
        return knowledge

    def on_begin(self, run: Coordinator) -> None:
        """Send a first copy."""
        self._send(run)

    def on_open(self, run: Coordinator) -> None:
        """Send a copy at the beginning of each segment."""
        self._send(run)

    def on_failure(self, run: Coordinator, rank: int) -> None:
        """Send a copy at once: the failed rank may have been the standby."""
        self._send(run)

    def on_report(self, run: Coordinator, report: WorkerReport) -> None:
        """Send a copy at intervals."""
        self._reports += 1
        if self._reports >= EVERY and self._transport.now() - self._sent_at >= PAUSE:
            self._send(run)

    def _send(self, run: Coordinator) -> None:
        if not self._transport.survives:
            return
        surviving = surviving_ranks(self._transport)
        standby = standby_coordinator(surviving, self._transport.hosts, self._mates)
        if standby is None:
            return
        self._reports, self._sent_at = 0, self._transport.now()
        data = packed(run.knowledge())
        if len(data) <= MOST_BYTES:
            self._transport.isend(data, standby, Tag.STANDBY)


def standby_coordinator(
    surviving: Sequence[int], hosts: Sequence[int], mates: Collection[int] = ()
) -> int | None:
    """Return the rank that keeps a copy of rank 0's accounting; None if no rank can survive it.

    It is the first rank on another host than rank 0's, or else the next rank that is not one of
    its ``mates``.
    """
    others = [rank for rank in surviving if rank and rank not in mates]
    return min(others, key=lambda rank: (hosts[rank] == hosts[0], rank), default=None)
