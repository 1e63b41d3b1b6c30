"""Which thread polls MPI, and how the threads of one rank keep out of each other's way.

Two facts about MPI shape this. A non-blocking send moves nothing while the program computes,
unless a thread enters the library: so a progress thread polls. And a rank that waits by spinning
takes the core from its neighbours: so waits back off into short sleeps.

The protocol:

- **One polls.** The polling lock is held by the thread that posts receives and tests for
  completions, which is when MPI copies what has arrived. At the same time another thread works on
  what it has and, with ``MPI_THREAD_MULTIPLE``, sends. With ``MPI_THREAD_SERIALIZED`` the same
  lock covers every call.
- **Beginning** needs no lock: a request is put on a queue, from which the next poll takes it.
  Posting an operation ends the doze of the progress thread.
- **Waiting.** A rank that waits polls for itself. If another thread is polling it does not queue
  up for the lock, but sleeps until that thread reports something that it has completed, at once
  and not when it comes out. The progress thread polls next to a rank that waits only while
  messages stream in: the rank works on one while the next is copied. When a wait is over the
  progress thread takes over.
- **Handlers** run after a poll, in the thread that polled, outside the polling lock and under the
  handlers' own. That one may be held while the polling lock is asked for, never the other way
  round.
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
"""The environment variable with the cores that a host's ranks have, if fewer than it shows: in
containers, or hosts that are namespaces of one machine."""
LIVELY = 0.02
"""Seconds after the last completion for which messages are taken to be moving."""
SPINS = 50
"""Polls without a sleep between, if every rank has a core."""
STEP = 0.00002
SHORT_NAP = 0.0002
"""Longest sleep, in seconds, between two polls of a waiting rank while messages move, ..."""
LONG_NAP = 0.0005
"""... and when nothing has moved lately."""
SHARE = 1 / 8
"""Of the quiet time, that a waiting rank sleeps where cores are shared, ..."""
SHARED_NAPS = (0.0001, 0.002)
"""... at least and at most, in seconds."""
BACKGROUND = (0.0005, 0.001)
"""Seconds between two polls while the rank computes: as messages move, and when none does."""
SHARED_BACKGROUND = (0.002, 0.004)
IDLE_BACKGROUND = (0.0005, 0.004)
"""At least and at most while it computes and no data are under way: `SHARE` of the quiet time."""
SHARED_IDLE_BACKGROUND = (0.002, 0.008)
PARKED = 0.02
"""Longest sleep of the progress thread while another one waits and polls."""


class PollBackoff:
    """The sleeps of one of the ``ranks`` on a host with so many ``cores``."""

    def __init__(self, ranks: int, cores: int) -> None:
        self.shares = ranks > cores
        self._background = SHARED_BACKGROUND if self.shares else BACKGROUND
        self._idle = SHARED_IDLE_BACKGROUND if self.shares else IDLE_BACKGROUND

    def nap(self, turn: int, quiet: float) -> float:
        """Return the sleep after poll ``turn``, ``quiet`` seconds after the last news."""
        if self.shares:
            shortest, longest = SHARED_NAPS
            return min(longest, max(shortest, SHARE * quiet))
        longest = SHORT_NAP if quiet < LIVELY else LONG_NAP
        return min(longest, STEP * max(0, turn - SPINS))

    def background(self, quiet: float, is_idle: bool = False) -> float:
        """Return the sleep between two background polls; ``is_idle``: no data are under way."""
        if is_idle:
            shortest, longest = self._idle
            return min(longest, max(shortest, SHARE * quiet))
        return self._background[quiet >= LIVELY]


def cores_of_host() -> int:
    """Return the cores of this host, or as many as its ranks have by `CORES`.

    Raises:
        UserError: the variable holds something else than a positive number.
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
"""Receives posted ahead for every handler."""

Receive = Callable[[Tensor, int, int], MpiRequest]
"""Posts a receive: its buffer, source and tag."""


class _Inbox:
    """The receives posted ahead for one handler, from a rank or ``ANY_SOURCE``, in their order."""

    def __init__(self, source: int, tag: int, handler: Handler) -> None:
        self.source = source
        self.tag = tag
        self.handler = handler
        self.posted: deque[MpiRequest] = deque()
        self.dropped = False
        """Its receives may have been abandoned, so that one that has ended holds no message."""


class Handlers:
    """Callbacks that run under ``lock``, one at a time, in whichever thread has polled."""

    def __init__(self, receive: Receive) -> None:
        self.lock = threading.RLock()
        self._receive = receive
        # Lists are replaced, not changed: another thread may be iterating over them.
        self._inboxes: list[_Inbox] = []
        self._when_done: list[tuple[Request | Event, Callable[[], None]]] = []
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

    def drop(self, applies: Callable[[int, int], bool]) -> None:
        """Handle no more messages to whose source and tag ``applies``."""
        # Marked too: another thread may be iterating over the old list.
        for inbox in self._inboxes:
            inbox.dropped |= applies(inbox.source, inbox.tag)
        self._inboxes = [inbox for inbox in self._inboxes if not inbox.dropped]

    def when_done(self, operation: Request | Event, action: Callable[[], None]) -> None:
        """Call ``action`` once the request has ended, or the event has happened."""
        with self.lock:
            self._when_done = [*self._when_done, (operation, action)]

    @property
    def awaits_events(self) -> bool:
        """Whether something is to be called once an event has happened."""
        return not all(isinstance(operation, Request) for operation, _ in self._when_done)

    def watch(self, look: Callable[[], None]) -> None:
        """Call ``look`` after every poll."""
        self._looks = [*self._looks, look]

    def unwatch(self, look: Callable[[], None]) -> None:
        """Stop calling ``look``."""
        self._looks = [each for each in self._looks if each != look]

    def run(self) -> None:
        """Run the handlers of what has arrived or ended."""
        for inbox in self._inboxes:
            if inbox.posted and inbox.posted[0].done:
                self._dispatch(inbox)
        if any(_has_ended(operation) for operation, _ in self._when_done):
            self._call_ended()
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

    def _call_ended(self) -> None:
        with self.lock:
            ended = [each for each in self._when_done if _has_ended(each[0])]
            self._when_done = [each for each in self._when_done if each not in ended]
            for _, action in ended:
                action()


def _has_ended(operation: Request | Event) -> bool:
    return operation.done if isinstance(operation, Request) else operation.query()


class Polling:
    """Polls, in the progress thread and in threads that wait.

    Attributes:
        lock: held by the thread that polls.
        closed: nothing is polled for any more.
        thread: the progress thread, if there is one.
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
        # A compute thread that stays in Python must not keep the progress thread
        # from the interpreter lock for the default 5 ms.
        sys.setswitchinterval(min(sys.getswitchinterval(), 0.0005))
        self.thread = threading.Thread(target=self._progress, name="mpi-progress", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """End the progress thread."""
        self._stopping = True
        if self.thread is not None:
            self.thread.join()

    def _progress(self) -> None:
        """Poll now and then, so that messages move while the rank computes."""
        requests, signals, streaming = self._requests, self._signals, False
        while not self._stopping:
            before = requests.completions
            if streaming or signals.waiters == 0:
                self.poll()
            streaming = requests.completions != before
            if not streaming:
                signals.takes_over.wait(self._pause())
                signals.takes_over.clear()
                signals.dozes = False

    def _pause(self) -> float:
        """Return the seconds until the next poll of the progress thread."""
        signals = self._signals
        if signals.waiters:
            return PARKED
        # First, so that what is added from here on ends the pause.
        signals.dozes = True
        signals.dozes = self._requests.is_quiet and not self._handlers.awaits_events
        return self._pace.background(self._quiet(), signals.dozes)

    def _quiet(self, since: float = 0.0) -> float:
        """Return for how many of the seconds ``since`` a moment nothing has been completed."""
        return time.perf_counter() - max(self._requests.last_news, since)

    # -- a poll --------------------------------------------------------------------
    def poll(self, patient: bool = False) -> bool:
        """Complete what can be completed, then run the handlers of what has arrived.

        Returns False if another thread is polling and completes it, unless ``patient``.
        """
        free = self.lock.acquire(blocking=patient)
        if free:
            try:
                if not self.closed:
                    self._requests.complete()
            finally:
                self.lock.release()
        if self._failures.untold:
            self.tell_failures()
        self._handlers.run()
        return free

    def tell_failures(self) -> None:
        """Report the ranks that have failed, as a handler."""
        with self._handlers.lock:
            while self._failures.untold:
                self._tell_failure(self._failures.untold.popleft())

    def _tell_failure(self, failed: int) -> None:
        self._handlers.drop(lambda source, tag: source == failed)
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
                found = look()
                if found >= 0:
                    return found
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
