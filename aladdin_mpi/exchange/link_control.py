"""How much a worker sends after a step, so that its link is busy but nothing queues."""

from __future__ import annotations

from math import inf

from aladdin_mpi.flat.state import Stateful, saved

LARGEST_SHARE = 0.5
"""Above it more bytes hardly carry more: half of the values are three quarters of the energy."""
SMALLEST_SHARE = FIRST_SHARE = 0.01
FIRST_GROWTH = 1.5
"""Factor after a round trip, until the link is full for the first time."""
GROWTH, DECREASE = 1.01, 0.93
"""Factors after a message, and after one that is left out, from then on."""
LARGEST_DECREASE = 0.5
"""Factor before the effect of a decrease is known."""
LATE = 2.0
"""Steps by which an answer may exceed the shortest time before the link counts as full."""


class LinkControl(Stateful):
    """Share of the values in each message of a worker.

    The link counts as full if an answer takes ``LATE`` steps longer than the fastest one so far.
    Then the step's message is left out, and the share decreases, but by no more than half until a
    message of the smaller share is late too. Otherwise it grows: at first once per round trip, as
    the queue that a message makes shows only then. The end of a send says less: a short message is
    copied at once, and the send of a long one may include the latency.

    Args:
        share: fixed share; None: adaptive.
    """

    SAVED = saved("share", "before", "shortest", "has_been_full")

    def __init__(self, share: float | None) -> None:
        self._is_fixed = share is not None
        self.share = FIRST_SHARE if share is None else share
        self.before = self.share
        """The share before the last decrease began."""
        self.shortest = inf
        """Shortest time from a message to its answer, in seconds."""
        self.has_been_full = False
        self._changed_at = -inf

    def open(self) -> None:
        """Start a segment, with nothing under way."""
        self._changed_at = -inf

    def answered(self, seconds: float) -> None:
        """Record that a message has been answered after so many seconds."""
        self.shortest = min(self.shortest, seconds)

    def end_step(self, oldest: float, now: float, step: float) -> bool:
        """Return whether to send now, and adapt the share.

        Args:
            oldest: time at which the oldest message without an answer was sent; ``now`` if none.
            now: current time; all times in seconds.
            step: duration of a step.
        """
        if self.shortest == inf and not self._is_fixed:
            return oldest == now  # a second message could only make a queue of unknown length
        is_full = now - oldest > self.shortest + LATE * step
        if not self._is_fixed:
            self._adapt(is_full, oldest, now, step)
        return not is_full

    def _adapt(self, is_full: bool, oldest: float, now: float, step: float) -> None:
        is_known = oldest > self._changed_at  # all messages of the former share are answered
        if is_full:
            if is_known or not self.has_been_full:
                if self.share <= SMALLEST_SHARE:
                    self.shortest += step  # the way is longer now, or the fastest answer was lucky
                self.before, self.has_been_full, self._changed_at = self.share, True, now
            least = max(self.before * LARGEST_DECREASE, SMALLEST_SHARE)
            self.share = max(self.share * DECREASE, least)
        elif self.has_been_full:
            self.share = min(self.share * GROWTH, LARGEST_SHARE)
        elif is_known:
            self.share, self._changed_at = min(self.share * FIRST_GROWTH, LARGEST_SHARE), now
