"""Collectives that all ranks start in one order, a few of them at a time.

Those that are under way share the links. If all were started at once, each step of the first one
would queue behind the first steps of all others, and it would end when they do: so the next one
starts when an earlier one has ended, which it does while the rank computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from aladdin_mpi.transport.base import EVENT_POLL, Transport
from aladdin_mpi.transport.request import Event, Request

UNDER_WAY = 2
"""Collectives under way at a time. With one the links idle from its end on one rank to the start
of the next on another; with more the first ones end later (docs/algorithms.md)."""


class InOrder:
    """A queue of collectives: first in, first out.

    One whose buffer is still being filled holds up those behind. All ranks have to put the same
    ones in the same order, and may start no others meanwhile.

    Args:
        most: collectives under way at a time; None: as many as there are.
    """

    def __init__(self, transport: Transport, most: int | None = UNDER_WAY) -> None:
        self._transport = transport
        self._most = most
        self._held: deque[Queued] = deque()
        self._under_way: list[Request] = []

    def put(self, start: Callable[[], Request], after: Event | None) -> Queued:
        """Call ``start`` when its turn has come and ``after`` has happened, if there is one."""
        queued = Queued(start, after)
        with self._transport.atomic():
            self._held.append(queued)
            self._launch()
        if after is not None and queued.request is None:
            self._transport.when_happened(after, self._launch)
        return queued

    def _launch(self) -> None:
        """Start as many as may be. Also called, by any thread, when one has ended."""
        # Whoever starts one: the next must not overtake it.
        with self._transport.atomic():
            self._under_way = [request for request in self._under_way if not request.done]
            while not self._are_most(self._under_way) and self._held and self._held[0].is_ready:
                queued = self._held.popleft()
                queued.request = queued.start()
                if self._most is not None and not queued.request.done:
                    self._under_way.append(queued.request)
                    self._transport.when_done(queued.request, self._launch)

    def _are_most(self, under_way: list[Request]) -> bool:
        """Whether these are as many as may be."""
        return self._most is not None and len(under_way) >= self._most

    def wait(self, queued: Queued) -> None:
        """Wait until it has ended."""
        self._launch()
        while queued.request is None:
            # Not started: it is behind others, or behind a copy from the GPU.
            if self._are_most(
                under_way := self._under_way
            ):  # which a handler may replace meanwhile
                self._transport.wait_any(under_way)
            else:
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
