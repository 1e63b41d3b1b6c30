"""Calls on behalf of a rank that sleeps, without waking it for each of them.

A worker tells of the end of each bucket, and often has little to do then. To switch to its own
greenlet, with all that lies on its stack, would cost more than that where there are a thousand.
So another greenlet, a caller, makes the calls for all ranks. Where a call blocks, its caller
stays with the rank until that is over, and another one makes the calls of the others meanwhile.
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
    """``action(i)`` at the i-th of ``moments``, for the rank of ``fiber``.

    Args:
        callers: greenlets that are free, for all ranks.
        moments: see :func:`sleep_between`; at least one. ``idle_until`` likewise.
    """

    __slots__ = (
        "_action",
        "_awaited",
        "_callers",
        "_clock",
        "_ends",
        "_fiber",
        "_idle_until",
        "_index",
        "_moments",
        "error",
    )

    def __init__(
        self,
        fiber: Fiber,
        callers: list[greenlet],
        moments: Sequence[float],
        action: Callable[[int], None],
        idle_until: IdleUntil | None = None,
    ) -> None:
        self._fiber = fiber
        self._clock = fiber.clock
        self._idle_until = idle_until
        self._awaited: Sequence[Operation] | None = None
        """While the rank has nothing to do: what has to end before it has."""
        self._ends = False
        """Whether there is an event for the last moment."""
        self._callers = callers
        self._moments = moments
        self._action = action
        self._index = 0
        self.error: Exception | None = None

    def make(self) -> None:
        """Return when all calls have been made.

        Raises:
            Exception: what a call has raised; no more were made.
        """
        self._fiber.begin_absence(ScheduledCallbacks.come, self, self._seconds)
        if self.error is not None:
            raise self.error

    @property
    def _seconds(self) -> float:
        return max(0.0, self._moments[self._index] - self._clock.now)

    def come(self) -> None:
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
        """Nothing is to be done before one of ``awaited`` has ended."""
        self._index += 1
        if self._index == len(self._moments):
            self._fiber.come_home()
        elif self._fiber.may_pause or not all(map(_can_tell, awaited)):
            self._fiber.call_later(ScheduledCallbacks.come, self, self._seconds)
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
            self._fiber.call_later(ScheduledCallbacks.end, self, max(0.0, last - self._clock.now))

    def operation_done(self, operation: Request) -> None:
        """One of those that were awaited has ended."""
        self._stir()
        if self._fiber.killed:
            return
        index, moments, now = self._index, self._moments, self._clock.now
        while index < len(moments) and moments[index] < now:
            index += 1
        self._index = index
        if index < len(moments):
            self._fiber.call_later(ScheduledCallbacks.come, self, self._seconds)

    def _stir(self) -> None:
        assert self._awaited is not None
        for operation in self._awaited:
            operation.waiter = None
        self._awaited = None

    def end(self) -> None:
        """The last moment has come; if there is still nothing to do, that is all."""
        self._ends = False
        if self._awaited is not None and not self._fiber.killed:
            self._stir()
            self._fiber.come_home()

    def call(self) -> bool:
        """Make the call; whether it was the last."""
        try:
            self._action(self._index)
        except Exception as error:
            self.error = error
            return True
        self._index += 1
        return self._index == len(self._moments)

    def go_on(self, is_over: bool) -> ScheduledCallbacks:
        """To the next event, or back to the rank; returns the visits to be served then."""
        self._callers.append(getcurrent())
        if is_over:
            following: ScheduledCallbacks = self._fiber.come_home()
        else:
            self._fiber.call_later(ScheduledCallbacks.come, self, self._seconds)
            following = self._fiber.hand_back()
        return following


def _call_for_all(visits: ScheduledCallbacks) -> None:
    """A caller's life: one call after another, for whichever rank is due."""
    while True:
        visits = visits.go_on(visits.call())


def _can_tell(request: Request) -> bool:
    """Whether ``request`` can tell of its end: nobody else is told."""
    return isinstance(request, Operation) and request.waiter is None
