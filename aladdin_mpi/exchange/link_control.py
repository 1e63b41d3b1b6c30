"""How much a worker sends after a step, so that its link is busy but nothing queues."""

from __future__ import annotations

from math import inf

from aladdin_mpi.flat.state import Stateful, saved

LARGEST_SHARE = 0.5
"""Above it more bytes hardly carry more: half of the values are three quarters of the energy."""
SMALLEST_SHARE = 0.04
"""Below it a message of fewer values does not make up for being sent more often."""
FIRST_SHARE = 0.04
FIRST_GROWTH, FIRST_DECREASE = 1.2, 0.5
"""Factors after a message until the link is full for the first time, and then."""
GROWTH, DECREASE = 1.01, 0.8
"""The same from then on."""
LATE = 1.5
"""Steps by which an answer may exceed the shortest time before the link counts as full."""


class LinkControl(Stateful):
    """Share of the values in each message of a worker.

    The link counts as full if an answer takes ``LATE`` steps longer than the fastest one so far.
    Then the step's message is left out, and the share decreases, but only once until a message of
    the smaller share is late too. Otherwise it grows. The end of a send says less: a short message
    is copied at once, and the send of a long one may include the latency.

    Args:
        share: fixed share; None: adaptive.
    """

    SAVED = saved("share", "shortest", "has_been_full")

    def __init__(self, share: float | None) -> None:
        self._is_fixed = share is not None
        self.share = FIRST_SHARE if share is None else share
        self.shortest = inf
        """Shortest time from a message to its answer, in seconds."""
        self.has_been_full = False
        self._decreased_at = -inf

    def open(self) -> None:
        """Start a segment, with nothing under way."""
        self._decreased_at = -inf

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
        is_full = now - oldest > self.shortest + LATE * step
        if not self._is_fixed:
            self._adapt(is_full, oldest, now, step)
        return not is_full

    def _adapt(self, is_full: bool, oldest: float, now: float, step: float) -> None:
        if not is_full:
            growth = GROWTH if self.has_been_full else FIRST_GROWTH
            self.share = min(self.share * growth, LARGEST_SHARE)
        elif oldest > self._decreased_at:
            if self.share <= SMALLEST_SHARE:
                self.shortest += step  # the way has become longer, or the fastest answer was lucky
            decrease = DECREASE if self.has_been_full else FIRST_DECREASE
            self.share = max(self.share * decrease, SMALLEST_SHARE)
            self.has_been_full, self._decreased_at = True, now
