"""The thread of control of one rank in a simulation, which blocks and is resumed."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet

from aladdin_mpi.errors import TransportError
from aladdin_mpi.options.cluster import Pauses
from aladdin_mpi.transport.base import Request, Traffic

EARLY = -1.0
"""Order among simultaneous events: before all others."""
LATE = 1.0
"""Order among simultaneous events: after the arrival of all messages."""

Action = Callable[[Any], None]
_Event = tuple[float, float, int, Action, Any]


class VirtualClock:
    """Events in order of time; the order of simultaneous events is random.

    ``random`` is the only source of randomness of the engine, so that a run depends only on
    its arguments and its seed.
    """

    __slots__ = ("_events", "_number", "_seed", "_stopped", "at", "now", "pass_by", "random")

    at: Callable[..., None]
    """``at(time, action, argument, turn=0.0)``: call ``action(argument)`` at ``time``; ``turn`` is
    0, EARLY or LATE."""
    pass_by: Callable[[], object]
    """Random draw for an event processed without :meth:`at`, see :meth:`next_due`."""

    def __init__(self, seed: int, start_time: float) -> None:
        self.now = start_time
        self._seed = seed
        self._events: list[_Event] = []
        self._number = count().__next__
        self._stopped = False
        self.reseed()

    def reseed(self, *key: int) -> None:
        """Reset the random numbers from the seed and ``key``."""
        self.random = random.Random("/".join(map(str, (self._seed, *key))))
        # A closure over local variables, as it is called for every piece of every message.
        push, events, number, draw = heappush, self._events, self._number, self.random.random

        def at(time: float, action: Action, argument: Any, turn: float = 0.0) -> None:
            push(events, (time, turn + draw(), number(), action, argument))

        self.at = at
        self.pass_by = draw

    def next_due(self) -> float:
        """Return the time of the next event.

        An event before it may be processed at once, at the end of the current event, if
        :attr:`pass_by` is called and ``now`` is set for it: the run is the same as with :meth:`at`.
        """
        if self._stopped:
            return self.now
        return self._events[0][0] if self._events else inf

    def run(self) -> bool:
        """Process events until :meth:`stop` is called; return False if no event remains."""
        events, pop = self._events, heappop
        self._stopped = False
        while not self._stopped:
            if not events:
                return False
            self.now, _, _, action, argument = pop(events)
            action(argument)
        return True

    def stop(self) -> None:
        """Let :meth:`run` return after the current event."""
        self._stopped = True


class AtomicSection(AbstractContextManager[None]):
    """A section of a rank's code in which it must not block; may be nested.

    With ``rank``, exceptions name it. One object serves all entries, as each step of each rank
    enters several.
    """

    __slots__ = ("_rank", "depth")

    def __init__(self, rank: int | None = None) -> None:
        self.depth = 0
        self._rank = rank

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.depth -= 1
        if self._rank is not None and isinstance(error, Exception):
            note_rank(error, self._rank)


class Fiber:
    """A greenlet under the clock, child of the greenlet that creates it.

    A rank may switch between several greenlets: it is resumed in the one in which it
    blocked.
    """

    def __init__(self, rank: int, clock: VirtualClock, pauses: Pauses, traffic: Traffic) -> None:
        self.rank = rank
        self.clock = clock
        self.atomic = AtomicSection()
        self.handler = AtomicSection(rank)
        """Sections in which the rank must not block."""
        self._pauses = pauses
        self._traffic = traffic
        self._hub = getcurrent()
        self._grad_mode = torch.is_grad_enabled()
        self._waits = 0
        self._answer: Request | None = None
        self._rank_greenlet: greenlet | None = None
        self._main: greenlet
        self._blocked: greenlet
        self.killed = False
        self.waiting: Collection[Request] | None = None
        """The requests that it waits for, during a wait."""

    def start(self, body: Callable[[], None]) -> None:
        """Start ``body`` at the current time."""
        self._main = self._blocked = greenlet(body)
        self._wake()

    @property
    def ended(self) -> bool:
        """Whether ``body`` has returned or was killed."""
        return self._main.dead

    # -- blocking -------------------------------------------------------------
    def sleep(self, seconds: float) -> None:
        """Block for ``seconds``, not counting the rank's pauses."""
        self.sleep_until(self._later(seconds))

    def sleep_until(self, end: float) -> None:
        """Block until ``end``, or until the end of a pause at that time."""
        self._must_be_free("sleep")
        self.clock.at(self._resumed(end), _resume, self, LATE)
        self._switch()

    def _later(self, seconds: float) -> float:
        """Return the time after ``seconds``, not counting the rank's pauses."""
        if self._pauses.spans:
            return self._pauses.stretched(self.clock.now, seconds)
        return self.clock.now + seconds

    def _resumed(self, moment: float) -> float:
        """Return ``moment``, or the end of a pause at that time."""
        return self._pauses.resumed(moment) if self._pauses.spans else moment

    @property
    def allows_callbacks(self) -> bool:
        """Whether the engine may make calls for this rank, in the same gradient mode."""
        return torch.is_grad_enabled() == self._grad_mode

    @property
    def may_pause(self) -> bool:
        """Whether the rank has pauses, which prolong its sleeps."""
        return bool(self._pauses.spans)

    def delegate(self, action: Action, argument: Any, seconds: float) -> None:
        """Block this rank; the first ``action`` on its behalf is called after ``seconds``."""
        self._must_be_free("sleep")
        outer, self._rank_greenlet = self._rank_greenlet, getcurrent()
        self.call_later(action, argument, seconds)
        self._switch()
        self._rank_greenlet = outer

    def call_later(self, action: Action, argument: Any, seconds: float) -> None:
        """Call ``action(argument)`` when this rank would return from a sleep of ``seconds``."""
        if self._rank_greenlet is not None:
            self._blocked = self._rank_greenlet  # the last call may have blocked elsewhere
        self.clock.at(self._later(seconds), action, argument, LATE)

    def resume_rank(self) -> Any:
        """End the delegation: continue with the rank in place of the current greenlet."""
        assert self._rank_greenlet is not None
        return self._rank_greenlet.switch()

    def return_to_engine(self) -> Any:
        """Continue with the engine's events; return the value that it switches back with."""
        return self._hub.switch()

    def wait(self, awaited: Collection[Request], timeout: float | None) -> Request | None:
        """Block until one of ``awaited`` is done; return it, or None after ``timeout``.

        Also returns None after :meth:`news` of them.
        """
        self._must_be_free("wait")
        clock = self.clock
        start = clock.now
        self.waiting = awaited
        self._waits += 1
        self._answer = None
        if timeout is not None:
            clock.at(start + max(timeout, 0.0), self._time_out, self._waits, LATE)
        self._switch()
        self._traffic.waiting += clock.now - start
        return self._answer

    def notify(self, request: Request) -> None:
        """Wake this rank if it waits for ``request``, which is done."""
        if self.waiting is not None and request in self.waiting:
            self._answer = request
            self._end_wait()

    def news(self, awaited: Collection[Request]) -> None:
        """Wake this rank if it waits for ``awaited``, one of which is done."""
        if self.waiting is awaited:
            self._end_wait()

    def _time_out(self, wait: int) -> None:
        if self.waiting is not None and wait == self._waits:
            self._end_wait()

    def _end_wait(self) -> None:
        self.waiting = None
        self._wake()

    def _wake(self) -> None:
        """Resume this rank now, or after its pause."""
        self.clock.at(self._resumed(self.clock.now), _resume, self, LATE)

    def _switch(self) -> None:
        """Let other ranks run until this rank is resumed, in the calling greenlet."""
        self._blocked = getcurrent()
        # Torch has one gradient mode for the thread, which runs all ranks.
        mode = torch.is_grad_enabled()
        if mode == self._grad_mode:
            self._hub.switch()
            return
        torch.set_grad_enabled(self._grad_mode)
        try:
            self._hub.switch()
        finally:
            torch.set_grad_enabled(mode)

    def _must_be_free(self, what: str) -> None:
        """Refuse to switch if another rank would see this one's unfinished operation."""
        if self.killed:
            raise GreenletExit
        if self.handler.depth:
            place = "a message handler: handlers must not wait"
        elif self.atomic.depth:
            place = "atomic(): leave it first"
        elif torch._C._current_graph_task_id() != -1:
            place = "a backward pass, of which torch runs one at a time: let it end first"
        elif torch.is_inference_mode_enabled():
            place = "torch.inference_mode(), which all ranks share: use torch.no_grad()"
        elif _in_autocast():
            place = "torch.autocast, which all ranks share: leave it first"
        else:
            return
        raise TransportError(f"rank {self.rank}: {what} inside {place}")

    def kill(self) -> None:
        """Unwind this rank, which can no longer block."""
        self.killed = True
        self.waiting = None
        for part in (self._main, self._rank_greenlet, self._blocked):
            if part is not None and not part.dead:
                # Exceptions of a failed process while it unwinds are not part of the simulation.
                with contextlib.suppress(Exception):
                    part.throw(GreenletExit)


def _resume(fiber: Fiber) -> None:
    """Let ``fiber`` run until it blocks again or ends."""
    if fiber._main.dead:
        return
    try:
        fiber._blocked.switch()
    except Exception as error:
        note_rank(error, fiber.rank)
        raise


def _in_autocast() -> bool:
    try:
        return torch.is_autocast_enabled("cpu")
    except TypeError:  # torch before 2.4
        return torch.is_autocast_cpu_enabled()


def note_rank(error: Exception, rank: int) -> None:
    """Add a note to an exception that names its rank."""
    note = f"raised by rank {rank}"
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # Python 3.10
        error.__notes__ = [*getattr(error, "__notes__", []), note]
