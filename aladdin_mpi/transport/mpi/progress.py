"""Polling of MPI, and synchronisation of the threads of one rank.

Two properties of MPI determine the design. A non-blocking send does not progress during
computation unless a thread enters the library, so a progress thread polls. And a rank that
busy-waits takes the core from other ranks, so waits back off into short sleeps.

The protocol:

- **One thread polls.** It holds the polling lock while it posts receives and tests for
  completions, which is when MPI copies received data. At the same time another thread can process
  messages and, with ``MPI_THREAD_MULTIPLE``, send. With ``MPI_THREAD_SERIALIZED`` the same lock
  covers every call.
- **Starting an operation** needs no lock: a request is put on a queue, from which the next poll
  takes it. This also wakes the progress thread.
- **Waiting.** A waiting rank polls itself. If another thread is polling, it does not wait for the
  lock, but sleeps until that thread reports a completion, which happens immediately and not at
  the end of the poll. The progress thread polls in addition to a waiting rank only while messages
  stream in: the rank processes one while the next is copied. After the wait the progress thread
  takes over.
- **Handlers** run after a poll, in the polling thread, outside the polling lock and under the
  handlers' lock. A thread may acquire the polling lock while holding the handlers' lock, never
  the other way round.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from aladdin_mpi.errors import UserError
from aladdin_mpi.transport.base import Event, Handler, Request
from aladdin_mpi.transport.mpi.requests import MpiRequest, Requests, Signals
from aladdin_mpi.transport.mpi.world import MpiFailures

CORES = "ALADDIN_MPI_CORES"
"""Environment variable with the number of cores available to a host's ranks, if fewer than the
host reports: in containers, or for hosts that are namespaces of one machine."""
LIVELY = 0.02
"""Seconds after the last completion during which messages are assumed to be moving."""
SPINS = 50
"""Number of polls without a sleep, if every rank has a core."""
STEP = 0.00002
SHORT_NAP = 0.0002
"""Longest sleep, in seconds, between two polls of a waiting rank while messages move, ..."""
LONG_NAP = 0.0005
"""... and when nothing has moved lately."""
SHARE = 1 / 8
"""Sleep of a waiting rank as a share of the quiet time, if cores are shared, ..."""
SHARED_NAPS = (0.0001, 0.002)
"""... with these limits in seconds."""
BACKGROUND = (0.0005, 0.001)
"""Seconds between two polls during computation: while messages move, and otherwise."""
SHARED_BACKGROUND = (0.002, 0.004)
IDLE_BACKGROUND = (0.0005, 0.004)
"""Limits during computation while no data are in flight: `SHARE` of the quiet time."""
SHARED_IDLE_BACKGROUND = (0.002, 0.008)
PARKED = 0.02
"""Longest sleep of the progress thread while another thread waits and polls."""


class PollBackoff:
    """Sleeps of one of ``ranks`` ranks on a host with ``cores`` cores."""

    def __init__(self, ranks: int, cores: int) -> None:
        self.shares = ranks > cores
        self._background = SHARED_BACKGROUND if self.shares else BACKGROUND
        self._idle = SHARED_IDLE_BACKGROUND if self.shares else IDLE_BACKGROUND

    def nap(self, turn: int, quiet: float) -> float:
        """Return the sleep after poll ``turn``, ``quiet`` seconds after the last completion."""
        if self.shares:
            shortest, longest = SHARED_NAPS
            return min(longest, max(shortest, SHARE * quiet))
        longest = SHORT_NAP if quiet < LIVELY else LONG_NAP
        return min(longest, STEP * max(0, turn - SPINS))

    def background(self, quiet: float, is_idle: bool = False) -> float:
        """Return the sleep between two background polls; ``is_idle``: no data are in flight."""
        if is_idle:
            shortest, longest = self._idle
            return min(longest, max(shortest, SHARE * quiet))
        return self._background[quiet >= LIVELY]


def cores_of_host() -> int:
    """Return the number of cores of this host for its ranks, from `CORES` if it is set.

    Raises:
        UserError: the variable is not a positive number.
    """
    given = os.environ.get(CORES)
    if given is None:
        return os.cpu_count() or 1
    if not given.isdecimal() or int(given) < 1:
        raise UserError(
            f"{CORES}: expected the number of cores that the ranks of this host have, got "
            f"{given!r}; unset it to use all of them"
        )
    return int(given)


HANDLER_DEPTH = 4
"""Number of receives posted ahead for every handler."""

Receive = Callable[[Tensor, int, int], MpiRequest]
"""Function that posts a receive, given its buffer, source and tag."""


class _MessageStream:
    """The receives posted ahead for one handler, from a rank or ``ANY_SOURCE``, in order."""

    def __init__(self, source: int, tag: int, nbytes: int, handler: Handler) -> None:
        self.source = source
        self.tag = tag
        self.nbytes = nbytes
        self.handler = handler
        self.posted: deque[MpiRequest] = deque()
        self.dropped = False
        """Whether its receives may have been abandoned: an ended one then contains no message."""


class Handlers:
    """Callbacks that run under ``lock``, one at a time, in any thread that has polled."""

    def __init__(self, receive: Receive) -> None:
        self.lock = threading.RLock()
        self._receive = receive
        # Lists are replaced, not changed: another thread may be iterating over them.
        self._inboxes: list[_MessageStream] = []
        self._of_failed: list[_MessageStream] = []
        self._when_done: list[tuple[Request | Event, Callable[[], None]]] = []
        self._looks: list[Callable[[], None]] = []

    def add(
        self, sources: Sequence[int], depth: int, tag: int, nbytes: int, handler: Handler
    ) -> None:
        """Call ``handler`` for each message with a tag; post ``depth`` receives for each source."""
        for source in sources:
            inbox = _MessageStream(source, tag, nbytes, handler)
            for _ in range(depth):
                self._post(inbox, torch.empty(nbytes, dtype=torch.uint8))
            with self.lock:
                self._inboxes = [*self._inboxes, inbox]

    def add_excluded(self, source: int, tag: int, nbytes: int, handler: Handler) -> None:
        """Call ``handler`` for each message of an excluded rank, once it has returned."""
        inbox = _MessageStream(source, tag, nbytes, handler)
        with self.lock:
            self._of_failed = [*self._of_failed, inbox]

    def drop_tags(self, tags: range) -> None:
        """Stop handling messages with these tags."""
        self._drop(lambda inbox: inbox.tag in tags)
        self._of_failed = [inbox for inbox in self._of_failed if inbox.tag not in tags]

    def drop_source(self, rank: int) -> None:
        """Stop handling messages of a failed rank."""
        self._of_failed = [*self._of_failed, *self._drop(lambda inbox: inbox.source == rank)]

    def resume_source(self, rank: int) -> None:
        """Handle messages of a rank again that had only been excluded."""
        returned = [inbox for inbox in self._of_failed if inbox.source == rank]
        self._of_failed = [inbox for inbox in self._of_failed if inbox.source != rank]
        for inbox in returned:
            self.add([rank], 1, inbox.tag, inbox.nbytes, inbox.handler)

    def _drop(self, applies: Callable[[_MessageStream], bool]) -> list[_MessageStream]:
        # Mark them too, as another thread may be iterating over the old list.
        dropped = [inbox for inbox in self._inboxes if applies(inbox)]
        for inbox in dropped:
            inbox.dropped = True
        self._inboxes = [inbox for inbox in self._inboxes if not inbox.dropped]
        return dropped

    def when_done(self, operation: Request | Event, action: Callable[[], None]) -> None:
        """Call ``action`` once the request has ended or the event has occurred."""
        with self.lock:
            self._when_done = [*self._when_done, (operation, action)]

    @property
    def awaits_events(self) -> bool:
        """Whether an action waits for an event."""
        return not all(isinstance(operation, Request) for operation, _ in self._when_done)

    def watch(self, look: Callable[[], None]) -> None:
        """Call ``look`` after every poll."""
        with self.lock:
            self._looks = [*self._looks, look]

    def unwatch(self, look: Callable[[], None]) -> None:
        """Stop calling ``look``."""
        with self.lock:
            self._looks = [each for each in self._looks if each != look]

    def run(self) -> None:
        """Run the handlers of messages and operations that have ended."""
        for inbox in self._inboxes:
            if inbox.posted and inbox.posted[0].done:
                self._dispatch(inbox)
        if any(_has_ended(operation) for operation, _ in self._when_done):
            self._call_ended()
        for look in self._looks:
            look()

    def _post(self, inbox: _MessageStream, buffer: Tensor) -> None:
        inbox.posted.append(self._receive(buffer, inbox.source, inbox.tag))

    def _dispatch(self, inbox: _MessageStream) -> None:
        with self.lock:
            while not inbox.dropped and inbox.posted and inbox.posted[0].done:
                request = inbox.posted.popleft()
                assert request.buffer is not None
                if request.failed is not None:
                    continue  # no more messages can arrive from a failed rank
                try:
                    inbox.handler(request.source, request.buffer[: request.nbytes])
                finally:
                    if not inbox.dropped:
                        self._post(inbox, request.buffer)

    def _call_ended(self) -> None:
        with self.lock:
            ended = [each for each in self._when_done if _has_ended(each[0])]
            self._when_done = [each for each in self._when_done if each not in ended]
            for _, action in ended:
                action()


def _has_ended(operation: Request | Event) -> bool:
    return operation.done if isinstance(operation, Request) else operation.query()


class Polling:
    """Polling by the progress thread and by waiting threads.

    Attributes:
        lock: held by the polling thread.
        closed: whether polling has ended.
        thread: the progress thread, if any.
    """

    def __init__(
        self,
        requests: Requests,
        handlers: Handlers,
        failures: MpiFailures,
        signals: Signals,
        pace: PollBackoff,
    ) -> None:
        self.lock = threading.Lock()
        self.closed = False
        self._requests = requests
        self._handlers = handlers
        self._failures = failures
        self._signals = signals
        self._pace = pace
        self._stopping = False
        self.thread: threading.Thread | None = None

    # -- the progress thread -----------------------------------------------------
    def start(self) -> None:
        """Start the progress thread."""
        # A compute thread in Python code must not keep the progress thread from the interpreter
        # lock for the default 5 ms.
        sys.setswitchinterval(min(sys.getswitchinterval(), 0.0005))
        self.thread = threading.Thread(target=self._progress, name="mpi-progress", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """End the progress thread."""
        self._stopping = True
        if self.thread is not None:
            self.thread.join()

    def _progress(self) -> None:
        """Poll periodically, so that messages progress during computation."""
        requests, signals, streaming = self._requests, self._signals, False
        while not self._stopping:
            before = requests.completions
            if streaming or signals.waiters == 0:
                self.poll()
            streaming = requests.completions != before
            if not streaming:
                signals.takes_over.wait(self._pause())
                signals.takes_over.clear()
                signals.polls_rarely = False

    def _pause(self) -> float:
        """Return the seconds until the next poll of the progress thread."""
        signals = self._signals
        if signals.waiters:
            return PARKED
        # Set first, so that operations added from here on end the pause.
        signals.polls_rarely = True
        signals.polls_rarely = self._requests.is_quiet and not self._handlers.awaits_events
        return self._pace.background(self._quiet(), signals.polls_rarely)

    def _quiet(self, since: float = 0.0) -> float:
        """Return the seconds without a completion, at most those since ``since``."""
        return time.perf_counter() - max(self._requests.last_news, since)

    # -- a poll --------------------------------------------------------------------
    def poll(self, patient: bool = False) -> bool:
        """Complete finished operations, then run their handlers.

        Returns False if another thread is polling, unless ``patient``.
        """
        free = self.lock.acquire(blocking=patient)
        if free:
            try:
                if not self.closed:
                    self._requests.complete()
            finally:
                self.lock.release()
        if self._failures.unreported:
            self.report_failures()
        self._handlers.run()
        return free

    def report_failures(self) -> None:
        """Report failed ranks to their actions, as a handler."""
        with self._handlers.lock:
            while self._failures.unreported:
                self._report_failure(self._failures.unreported.popleft())

    def _report_failure(self, failed: int) -> None:
        self._handlers.drop_source(failed)
        for action in self._failures.actions:
            action(failed)

    # -- waiting -------------------------------------------------------------------
    def wait_until(self, look: Callable[[], int], start: float, limit: float | None) -> int:
        """Poll until ``look`` returns 0 or more, and return that; -1 after ``limit`` seconds.

        ``start`` is the time at which the wait began.
        """
        signals = self._signals
        signals.waiters += 1
        try:
            turn = 0
            while True:
                signals.news.clear()
                polled = self.poll()
                index = look()
                if index >= 0:
                    return index
                if limit is not None and time.perf_counter() - start > limit:
                    return -1
                if not polled:
                    signals.news.wait(SHORT_NAP)
                elif nap := self._pace.nap(turn, self._quiet(since=start)):
                    time.sleep(nap)
                turn += 1
        finally:
            signals.waiters -= 1
            if self.thread is not None:
                signals.takes_over.set()
