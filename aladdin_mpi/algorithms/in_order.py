"""Collectives that all ranks start in one order, each as soon as its buffer is filled."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from aladdin_mpi.transport.base import Event, Request, Transport

EVENT_POLL = 0.0001
"""Seconds between two looks at a copy from the GPU."""


class InOrder:
    """A queue of collectives; one whose buffer is still being filled holds up those behind."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._held: deque[Queued] = deque()

    def put(self, start: Callable[[], Request], after: Event | None) -> Queued:
        """Call ``start`` when its turn has come and ``after`` has happened, if there is one."""
        queued = Queued(start, after)
        self._held.append(queued)
        self._launch()
        return queued

    def _launch(self) -> None:
        while self._held and self._held[0].is_ready:
            queued = self._held.popleft()
            queued.request = queued.start()

    def wait(self, queued: Queued) -> None:
        """Wait until it has ended."""
        self._launch()
        while queued.request is None:
            self._transport.sleep(EVENT_POLL)
            self._launch()
        self._transport.wait(queued.request)


class Queued:
    """A collective that has been put into the queue."""

    def __init__(self, start: Callable[[], Request], after: Event | None) -> None:
        self.start = start
        self.request: Request | None = None
        self._after = after

    @property
    def is_ready(self) -> bool:
        """Whether its buffer is filled."""
        return self._after is None or self._after.query()
