"""Calls on behalf of a sleeping rank, without waking it for each of them.

A worker reports the end of each bucket, and often has little else to do. With a thousand workers,
switching to each one's greenlet, with its stack, would cost more than the call itself. So another
greenlet, a caller, makes the calls for all ranks. If a call blocks, its caller stays with the rank
until the call returns, and another caller serves the others. If a rank has nothing to do before a
message is sent, no event is created: the end of that message triggers the next call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from greenlet import getcurrent, greenlet

from aladdin_mpi.transport.base import IdleUntil, Request
from aladdin_mpi.transport.virtual.fiber import Fiber, note_rank
from aladdin_mpi.transport.virtual.messages import Operation


class ScheduledCallbacks:
    """Calls of ``action(i)`` at the i-th of ``moments``, for the rank of ``fiber``.

    Implements `sleep_between` with at least one moment. All ranks share the free ``callers``.
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
        """The operations one of which must end before the rank has work; None: it has."""
        self._has_last_event = False
        """Whether an event for the last moment exists."""
        self._callers = callers
        self._moments = moments
        self._action = action
        self._index = 0
        self._error: Exception | None = None

    def make(self) -> None:
        """Make all calls; an exception of one of them ends them and is raised here."""
        self._fiber.delegate(ScheduledCallbacks._on_moment, self, self._until(self._moments[0]))
        if self._error is not None:
            raise self._error

    def _until(self, moment: float) -> float:
        return max(0.0, moment - self._fiber.clock.now)

    def _call_later(self) -> None:
        seconds = self._until(self._moments[self._index])
        self._fiber.call_later(ScheduledCallbacks._on_moment, self, seconds)

    def _on_moment(self) -> None:
        """Handle the next moment, in the engine's greenlet."""
        if self._fiber.killed:
            return
        try:
            awaited = None if self._idle_until is None else self._idle_until()
            if awaited is not None:
                self._skip(awaited)
                return
            caller = self._callers.pop() if self._callers else greenlet(_call_for_all)
            caller.switch(self)
        except Exception as error:
            note_rank(error, self._fiber.rank)
            raise

    def _skip(self, awaited: Sequence[Request]) -> None:
        """Skip calls until one of ``awaited`` has ended."""
        self._index += 1
        if self._index == len(self._moments):
            self._fiber.resume_rank()
        elif self._fiber.may_pause or not all(map(_can_notify, awaited)):
            self._call_later()
        else:
            self._wait_for_end([each for each in awaited if isinstance(each, Operation)])

    def _wait_for_end(self, awaited: Sequence[Operation]) -> None:
        """Return at the first moment after the end of one of ``awaited``, or at the last moment."""
        self._awaited = awaited
        for operation in awaited:
            operation.waiter = self
        if not self._has_last_event:
            self._has_last_event = True
            last = max(self._moments[self._index :])
            self._fiber.call_later(ScheduledCallbacks._end, self, self._until(last))

    def operation_done(self, operation: Request) -> None:
        """Resume the calls after one of the awaited operations has ended."""
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
        """End at the last moment if there is still nothing to do."""
        self._has_last_event = False
        if self._awaited is not None and not self._fiber.killed:
            self._stop_waiting()
            self._fiber.resume_rank()

    def call(self) -> ScheduledCallbacks:
        """Make the call that is due; return the callbacks that this caller serves next."""
        try:
            self._action(self._index)
            self._index += 1
        except Exception as error:
            self._error = error
        self._callers.append(getcurrent())
        following: ScheduledCallbacks
        if self._error is not None or self._index == len(self._moments):
            following = self._fiber.resume_rank()
        else:
            self._call_later()
            following = self._fiber.return_to_engine()
        return following


def _call_for_all(callbacks: ScheduledCallbacks) -> None:
    """Run a caller: make one call after another, for any rank that is due."""
    while True:
        callbacks = callbacks.call()


def _can_notify(request: Request) -> bool:
    """Return whether ``request`` can notify of its end: it has no other waiter."""
    return isinstance(request, Operation) and request.waiter is None
