"""What interrupts a rank's own work: handlers of messages, of requests' ends, and looks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from aladdin_mpi.transport.base import Handler
from aladdin_mpi.transport.mpi.pending import MpiRequest
from aladdin_mpi.transport.request import Event, Request

HANDLER_DEPTH = 4
"""Receives posted ahead for every handler."""

Receive = Callable[[Tensor, int, int], MpiRequest]
"""Posts a receive: its buffer, source and tag."""


class _Inbox:
    """The receives posted ahead for one handler, in the order of posting.

    ``source`` is a rank, or ``ANY_SOURCE``.
    """

    def __init__(self, source: int, tag: int, handler: Handler) -> None:
        self.source = source
        self.tag = tag
        self.handler = handler
        self.posted: deque[MpiRequest] = deque()
        self.dropped = False
        """Its receives may have been abandoned, so that one that has ended holds no message."""


class Handlers:
    """They run under ``lock``, one at a time, in whichever thread has polled."""

    def __init__(self, receive: Receive) -> None:
        self.lock = threading.RLock()
        self._receive = receive
        # Lists are replaced, not changed: another thread may be going through them.
        self._inboxes: list[_Inbox] = []
        self._when_done: list[tuple[Request, Callable[[], None]]] = []
        self._when_happened: list[tuple[Event, Callable[[], None]]] = []
        self._looks: list[Callable[[], None]] = []

    def add(
        self, sources: Sequence[int], depth: int, tag: int, nbytes: int, handler: Handler
    ) -> None:
        """Call ``handler`` with each message of a tag; ``depth`` receives for each source."""
        for source in sources:
            inbox = _Inbox(source, tag, handler)
            for _ in range(depth):
                self._post(inbox, torch.empty(nbytes, dtype=torch.uint8))
            self._inboxes = [*self._inboxes, inbox]

    def drop(self, source: int) -> None:
        """No more messages come from this rank."""
        self._drop(lambda inbox: inbox.source == source)

    def drop_tags(self, tags: range) -> None:
        """No message of these tags is handled any more."""
        with self.lock:
            self._drop(lambda inbox: inbox.tag in tags)

    def _drop(self, is_meant: Callable[[_Inbox], bool]) -> None:
        # Marked too: another thread may be going through the old list.
        for inbox in filter(is_meant, self._inboxes):
            inbox.dropped = True
        self._inboxes = [inbox for inbox in self._inboxes if not inbox.dropped]

    def when_done(self, request: Request, action: Callable[[], None]) -> None:
        """Call ``action`` once the request has ended."""
        with self.lock:
            self._when_done = [*self._when_done, (request, action)]

    def when_happened(self, event: Event, action: Callable[[], None]) -> None:
        """Call ``action`` once ``event`` has happened."""
        with self.lock:
            self._when_happened = [*self._when_happened, (event, action)]

    @property
    def awaits_events(self) -> bool:
        """Whether something is to be called once an event has happened."""
        return bool(self._when_happened)

    def watch(self, look: Callable[[], None]) -> None:
        """Call ``look`` after every poll."""
        self._looks = [*self._looks, look]

    def unwatch(self, look: Callable[[], None]) -> None:
        """Call it no more."""
        self._looks = [each for each in self._looks if each != look]

    def run(self) -> None:
        """Run those of what has come."""
        for inbox in self._inboxes:
            if inbox.posted and inbox.posted[0].done:
                self._dispatch(inbox)
        if any(request.done for request, _ in self._when_done):
            self._tell_ends()
        if self._when_happened:
            self._tell_events()
        for look in self._looks:
            look()

    def _post(self, inbox: _Inbox, buffer: Tensor) -> None:
        inbox.posted.append(self._receive(buffer, inbox.source, inbox.tag))

    def _dispatch(self, inbox: _Inbox) -> None:
        with self.lock:
            while not inbox.dropped and inbox.posted and inbox.posted[0].done:
                request = inbox.posted.popleft()
                assert request.buffer is not None
                if request.failed is not None:
                    continue  # no more of these will come
                try:
                    inbox.handler(request.source, request.buffer[: request.nbytes])
                finally:
                    if not inbox.dropped:
                        self._post(inbox, request.buffer)

    def _tell_ends(self) -> None:
        with self.lock:
            ended = [each for each in self._when_done if each[0].done]
            self._when_done = [each for each in self._when_done if each not in ended]
            for _, action in ended:
                action()

    def _tell_events(self) -> None:
        with self.lock:
            happened = [each for each in self._when_happened if each[0].query()]
            self._when_happened = [each for each in self._when_happened if each not in happened]
            for _, action in happened:
                action()
