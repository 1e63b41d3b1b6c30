"""Calls on behalf of a rank that sleeps, without waking it for each of them.

A worker tells of the end of each bucket, and often has little to do then. To switch to its own
greenlet, with all that lies on its stack, would cost more than that where there are a thousand.
So another greenlet, a caller, makes the calls for all ranks. Where a call blocks, its caller
stays with the rank until that is over, and another one makes the calls of the others meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from greenlet import getcurrent, greenlet

from aladdin_mpi.transport.virtual.fiber import Fiber, note_rank


class Visits:
    """``action(i)`` at the i-th of ``moments``, for the rank of ``fiber``.

    Args:
        callers: greenlets that are free, for all ranks.
        moments: see :meth:`Transport.sleep_between`; at least one. ``is_idle`` likewise.
    """

    __slots__ = (
        "_action",
        "_callers",
        "_clock",
        "_fiber",
        "_index",
        "_is_idle",
        "_moments",
        "error",
    )

    def __init__(
        self,
        fiber: Fiber,
        callers: list[greenlet],
        moments: Sequence[float],
        action: Callable[[int], None],
        is_idle: Callable[[], bool] | None = None,
    ) -> None:
        self._fiber = fiber
        self._clock = fiber.clock
        self._is_idle = is_idle
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
        self._fiber.begin_absence(Visits.come, self, self._seconds)
        if self.error is not None:
            raise self.error

    @property
    def _seconds(self) -> float:
        return max(0.0, self._moments[self._index] - self._clock.now)

    def come(self) -> None:
        """The next moment has come; in the engine's greenlet."""
        if self._fiber.killed:
            return
        is_idle = self._is_idle
        try:
            if is_idle is not None and is_idle():
                self._pass()
                return
            caller = self._callers.pop() if self._callers else greenlet(_call_for_all)
            caller.switch(self)
        except Exception as error:
            note_rank(error, self._fiber.rank)
            raise

    def _pass(self) -> None:
        """Nothing is to be done at this moment."""
        fiber, moments = self._fiber, self._moments
        self._index = index = self._index + 1
        if index == len(moments):
            fiber.come_home()
            return
        seconds = (
            moments[index] - self._clock.now
        )  # as _seconds, which is asked for most often here
        fiber.call_later(Visits.come, self, seconds if seconds > 0.0 else 0.0)

    def call(self) -> bool:
        """Make the call; whether it was the last."""
        try:
            self._action(self._index)
        except Exception as error:
            self.error = error
            return True
        self._index += 1
        return self._index == len(self._moments)

    def go_on(self, is_over: bool) -> Visits:
        """To the next event, or back to the rank; returns the visits to be served then."""
        self._callers.append(getcurrent())
        if is_over:
            following: Visits = self._fiber.come_home()
        else:
            self._fiber.call_later(Visits.come, self, self._seconds)
            following = self._fiber.hand_back()
        return following


def _call_for_all(visits: Visits) -> None:
    """A caller's life: one call after another, for whichever rank is due."""
    while True:
        visits = visits.go_on(visits.call())
