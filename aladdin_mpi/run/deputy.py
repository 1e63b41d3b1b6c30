"""What rank 0 alone knows of a run, kept a second time on another host.

It is small: where the run is, who has failed, what is due. Rank 0 sends it every few reports of
workers, so that the books go on when rank 0 is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.control.budget import Report
from aladdin_mpi.control.exchange import packed, unpacked
from aladdin_mpi.control.tags import COORDINATOR, Tag
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.request import Request

EVERY = 8
"""Reports of workers between two copies, ..."""
PAUSE = 0.05
"""... and seconds, at least: making one takes a third of a millisecond."""
MOST_BYTES = 1 << 16


def deputy_of(transport: Transport) -> int | None:
    """The first rank on another host than rank 0's, or else the next one; None: rank 0 is alone."""
    others = [rank for rank in transport.living if rank]
    away = [rank for rank in others if transport.hosts[rank] != transport.hosts[0]]
    return next(iter(away or others), None)


class Deputy:
    """This rank's side of the copies; there are none where a rank's death ends the job.

    Any rank may become the deputy, as the one before it is lost: so all listen.

    Args:
        look: at rank 0, what it knows now.
    """

    def __init__(self, transport: Transport, look: Callable[[], dict[str, Any]] | None) -> None:
        self._transport = transport
        self._look = look
        self._reports, self._sent_at = 0, 0.0
        self._newest: Tensor | None = None
        self._came_at = 0.0
        if not transport.survives:
            return
        transport.exclude_from_traffic(Tag.DEPUTY)
        if transport.rank != COORDINATOR:
            self._listen()

    def _listen(self) -> None:
        buffer = torch.empty(MOST_BYTES, dtype=torch.uint8)
        request = self._transport.irecv(buffer, COORDINATOR, Tag.DEPUTY)
        self._transport.when_done(request, lambda: self._take(request))

    def _take(self, request: Request) -> None:
        if request.failed is None and request.nbytes and request.buffer is not None:
            self._newest = request.buffer[: request.nbytes]
            self._came_at = self._transport.now()
            self._listen()

    @property
    def copy(self) -> dict[str, Any] | None:
        """The newest one, at a rank that is the deputy or has been; None elsewhere.

        Training has gone on since it came: so its ``seconds`` are those of now.
        """
        if self._newest is None:
            return None
        found: dict[str, Any] = unpacked(self._newest)
        if found["is_open"]:
            found["seconds"] += self._transport.now() - self._came_at
        return found

    def hear(self, report: Report) -> None:
        """At rank 0, of every report."""
        self._reports += 1
        if self._reports >= EVERY and self._transport.now() - self._sent_at >= PAUSE:
            self.send()

    def send(self) -> None:
        """At rank 0: send a copy now."""
        deputy = deputy_of(self._transport) if self._transport.survives else None
        if self._look is None or deputy is None:
            return
        self._reports, self._sent_at = 0, self._transport.now()
        data = packed(self._look())
        if len(data) <= MOST_BYTES:  # not so with thousands of refusals of many kinds
            self._transport.isend(data, deputy, Tag.DEPUTY)
