"""Calls on behalf of a rank that sleeps, without waking it for each of them.

A worker reports the end of each bucket, and often has little to do then. To switch to its own
greenlet, with all that lies on its stack, would cost more than that where there are a thousand.
So another greenlet, a caller, makes the calls for all ranks. If a call blocks, its caller
stays with the rank until that is over, and another one makes the calls of the others.
While a rank has nothing to do before a message of its own has left, there is no event for it at
all: the end of that message brings the next call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from greenlet import getcurrent, greenlet

from aladdin_mpi.transport.base import IdleUntil, Request
from aladdin_mpi.transport.virtual.fiber import Fiber, note_rank
from aladdin_mpi.transport.virtual.messages import Operation


class ScheduledCallbacks:
    """``action(i)`` at the i-th of ``moments``, for the rank of ``fiber``: see `sleep_between`.

    There is at least one moment. ``callers`` are greenlets that are free, for all ranks.
    """

    def __init__(
        self,
        fiber: Fiber,
        callers: list[greenlet],
        moments: Sequence[float],
        action: Callable[[int], None],
        idle_until: IdleUntil | None = None,
    ) -> None:
        self._fiber = fiber
        self._idle_until = idle_until
        self._awaited: Sequence[Operation] | None = None
        """While the rank has nothing to do: what has to end before it has."""
        self._ends = False
        """Whether there is an event for the last moment."""
        self._callers = callers
        self._moments = moments
        self._action = action
        self._index = 0
        self._error: Exception | None = None

    def make(self) -> None:
        """Make all calls; an exception of one of them ends them and is raised here."""
        self._fiber.begin_absence(ScheduledCallbacks._come, self, self._until(self._moments[0]))
        if self._error is not None:
            raise self._error

    def _until(self, moment: float) -> float:
        return max(0.0, moment - self._fiber.clock.now)

    def _call_later(self) -> None:
        seconds = self._until(self._moments[self._index])
        self._fiber.call_later(ScheduledCallbacks._come, self, seconds)

    def _come(self) -> None:
        """The next moment has come; in the engine's greenlet."""
        if self._fiber.killed:
            return
        try:
            awaited = None if self._idle_until is None else self._idle_until()
            if awaited is not None:
                self._pass(awaited)
                return
            caller = self._callers.pop() if self._callers else greenlet(_call_for_all)
            caller.switch(self)
        except Exception as error:
            note_rank(error, self._fiber.rank)
            raise

    def _pass(self, awaited: Sequence[Request]) -> None:
        """Skip calls until one of ``awaited`` has ended."""
        self._index += 1
        if self._index == len(self._moments):
            self._fiber.come_home()
        elif self._fiber.may_pause or not all(map(_can_tell, awaited)):
            self._call_later()
        else:
            self._rest([each for each in awaited if isinstance(each, Operation)])

    def _rest(self, awaited: Sequence[Operation]) -> None:
        """Come back at the first moment after one of ``awaited`` has ended, or at the last one."""
        self._awaited = awaited
        for operation in awaited:
            operation.waiter = self
        if not self._ends:
            self._ends = True
            last = max(self._moments[self._index :])
            self._fiber.call_later(ScheduledCallbacks._end, self, self._until(last))

    def operation_done(self, operation: Request) -> None:
        """Resume the calls: one of those that were awaited has ended."""
        self._stop_waiting()
        if self._fiber.killed:
            return
        index, moments, now = self._index, self._moments, self._fiber.clock.now
        while index < len(moments) and moments[index] < now:
            index += 1
        self._index = index
        if index < len(moments):
            self._call_later()

    def _stop_waiting(self) -> None:
        for operation in self._awaited or ():
            operation.waiter = None
        self._awaited = None

    def _end(self) -> None:
        """The last moment has come; if there is still nothing to do, that is all."""
        self._ends = False
        if self._awaited is not None and not self._fiber.killed:
            self._stop_waiting()
            self._fiber.come_home()

    def call(self) -> ScheduledCallbacks:
        """Make the call that is due; return what is served next, by the present caller."""
        try:
            self._action(self._index)
            self._index += 1
        except Exception as error:
            self._error = error
        self._callers.append(getcurrent())
        following: ScheduledCallbacks
        if self._error is not None or self._index == len(self._moments):
            following = self._fiber.come_home()
        else:
            self._call_later()
            following = self._fiber.hand_back()
        return following


def _call_for_all(callbacks: ScheduledCallbacks) -> None:
    """A caller's life: one call after another, for whichever rank is due."""
    while True:
        callbacks = callbacks.call()


def _can_tell(request: Request) -> bool:
    """Return whether ``request`` can notify of its end: nothing else waits for it."""
    return isinstance(request, Operation) and request.waiter is None
