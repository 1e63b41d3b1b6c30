"""Who polls MPI, and how the threads of one rank keep out of each other's way.

Two facts about MPI shape this. A non-blocking send moves nothing while the program computes,
unless somebody enters the library: so a progress thread polls. And a rank that waits by spinning
takes the core from its neighbours: so waits back off into short sleeps.

The protocol:

- **One polls.** The polling lock is held by whoever posts receives and tests for completions,
  which is when MPI copies what has come. Meanwhile another thread works on what it has and, with
  ``MPI_THREAD_MULTIPLE``, sends. With ``MPI_THREAD_SERIALIZED`` the same lock covers every call.
- **Beginning** needs no lock: a request is put on a queue, from which the next poll takes it.
  Who begins something ends the doze of the progress thread.
- **Waiting.** A rank that waits polls for itself. Who finds another thread at it does not queue
  up for the lock, but sleeps until that thread tells of something that it has completed, at once
  and not when it comes out. The progress thread polls beside a rank that waits only while
  messages stream in: the rank works on one while the next is copied. When a wait is over the
  progress thread takes over.
- **Handlers** run after a poll, in the thread that polled, outside the polling lock and under the
  handlers' own. That one may be held while the polling lock is asked for, never the other way
  round.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator

from aladdin_mpi.transport.mpi.failures import Failures
from aladdin_mpi.transport.mpi.handlers import Handlers
from aladdin_mpi.transport.mpi.pace import PARKED, SHORT_NAP, Pace
from aladdin_mpi.transport.mpi.requests import Requests
from aladdin_mpi.transport.mpi.signals import Signals


class Polling:
    """Polls, in the progress thread and for those who wait.

    Attributes:
        lock: of whoever polls.
        closed: nothing is polled for any more.
        thread: the progress thread; None: there is none.
    """

    def __init__(
        self,
        requests: Requests,
        handlers: Handlers,
        failures: Failures,
        signals: Signals,
        pace: Pace,
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
        """Enter MPI now and then, so that messages move while the rank computes."""
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
        """Seconds until the next look of the progress thread."""
        signals = self._signals
        if signals.waiters:
            return PARKED
        # First, so that what is added from here on ends the pause.
        signals.dozes = True
        signals.dozes = self._requests.is_quiet and not self._handlers.awaits_events
        return self._pace.background(self._quiet(), signals.dozes)

    def _quiet(self, since: float = 0.0) -> float:
        """Seconds in which nothing has been completed, of those ``since`` a moment."""
        return time.perf_counter() - max(self._requests.last_news, since)

    # -- a poll --------------------------------------------------------------------
    def poll(self, patient: bool = False) -> bool:
        """Complete what can be completed, then run the handlers of what has come.

        Returns False if another thread is at it, which is left to do so, unless ``patient``.
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
        """Say who has failed, as a handler."""
        with self._handlers.lock:
            self._failures.tell(self._handlers.drop)

    # -- waiting -------------------------------------------------------------------
    def wait_until(self, look: Callable[[], int], start: float, limit: float | None) -> int:
        """Poll until ``look`` finds something, and return that; -1: it took too long.

        Args:
            look: returns less than 0 while there is nothing.
            start: when the wait began.
            limit: its longest time in seconds; None: for ever.
        """
        signals = self._signals
        signals.waiters += 1
        try:
            for turn in _turns():
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
        finally:
            signals.waiters -= 1
            if self.thread is not None:
                signals.takes_over.set()
        raise AssertionError("turns do not end")


def _turns() -> Iterator[int]:
    turn = 0
    while True:
        yield turn
        turn += 1
