"""How often a rank looks into MPI, where messages move only while somebody looks.

A rank that waits by spinning takes its core from whoever shares it. Where there are more ranks
on a host than cores, even short sleeps do: a look every 0.3 ms takes 8 % of a core, 15 % while
messages move. There a rank sleeps in proportion to how long nothing has happened, which makes no
wait longer than by a sixteenth, and takes about half of that.
"""

from __future__ import annotations

LIVELY = 0.02
"""Seconds after the last completion for which messages are taken to be moving."""
SPINS = 50
"""Looks without a sleep between, where every rank has a core."""
STEP = 0.00002
SHORT_NAP = 0.0002
"""Longest sleep, in seconds, between two looks of a waiting rank while messages move, ..."""
LONG_NAP = 0.0005
"""... and when nothing has moved lately."""
SHARE = 1 / 16
"""Of the quiet time, that a waiting rank sleeps where cores are shared, ..."""
SHARED_NAPS = (0.00005, 0.001)
"""... at least and at most, in seconds."""
BACKGROUND = (0.0005, 0.001)
"""Seconds between two looks while the rank computes: as messages move, and when none has lately."""
SHARED_BACKGROUND = (0.001, 0.002)
PARKED = 0.02
"""Longest sleep of the thread that looks in the background while another one waits and looks."""


class Pace:
    """The sleeps of one rank.

    Args:
        ranks: on its host.
        cores: that they have.
    """

    def __init__(self, ranks: int, cores: int) -> None:
        self.shares = ranks > cores
        self._background = SHARED_BACKGROUND if self.shares else BACKGROUND

    def nap(self, turn: int, quiet: float) -> float:
        """Seconds to sleep after look number ``turn``, ``quiet`` seconds after the last news."""
        if self.shares:
            shortest, longest = SHARED_NAPS
            return min(longest, max(shortest, SHARE * quiet))
        longest = SHORT_NAP if quiet < LIVELY else LONG_NAP
        return min(longest, STEP * max(0, turn - SPINS))

    def background(self, quiet: float) -> float:
        """Seconds between two looks of the background."""
        return self._background[quiet >= LIVELY]
