"""How often a rank looks into MPI, where messages move only while somebody looks.

A rank that waits by spinning takes its core from whoever shares it. Where there are more ranks
on a host than cores, even short sleeps do: a look every 0.3 ms takes 8 % of a core, 15 % while
messages move. There a rank sleeps in proportion to how long nothing has happened, which makes no
wait longer than by an eighth, and takes a fraction of that. So does the thread that looks while a
rank computes, where no data are under way: waking it takes 40 us, so that a look every 0.75 ms
took 5 % of a step on a core (docs/performance.md).
"""

from __future__ import annotations

import os

from aladdin_mpi.errors import UserError

CORES = "ALADDIN_MPI_CORES"
"""The environment variable with the cores that a host's ranks have, where that is fewer than it
shows them: in containers, or hosts that are namespaces of one machine."""
LIVELY = 0.02
"""Seconds after the last completion for which messages are taken to be moving."""
SPINS = 50
"""Looks without a sleep between, where every rank has a core."""
STEP = 0.00002
SHORT_NAP = 0.0002
"""Longest sleep, in seconds, between two looks of a waiting rank while messages move, ..."""
LONG_NAP = 0.0005
"""... and when nothing has moved lately."""
SHARE = 1 / 8
"""Of the quiet time, that a waiting rank sleeps where cores are shared, ..."""
SHARED_NAPS = (0.0001, 0.002)
"""... at least and at most, in seconds."""
BACKGROUND = (0.0005, 0.001)
"""Seconds between two looks while the rank computes: as messages move, and when none has lately."""
SHARED_BACKGROUND = (0.002, 0.004)
IDLE_BACKGROUND = (0.0005, 0.004)
"""At least and at most while it computes and no data are under way: `SHARE` of the quiet time."""
SHARED_IDLE_BACKGROUND = (0.002, 0.008)
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
        self._idle = SHARED_IDLE_BACKGROUND if self.shares else IDLE_BACKGROUND

    def nap(self, turn: int, quiet: float) -> float:
        """Seconds to sleep after look number ``turn``, ``quiet`` seconds after the last news."""
        if self.shares:
            shortest, longest = SHARED_NAPS
            return min(longest, max(shortest, SHARE * quiet))
        longest = SHORT_NAP if quiet < LIVELY else LONG_NAP
        return min(longest, STEP * max(0, turn - SPINS))

    def background(self, quiet: float, is_idle: bool = False) -> float:
        """Seconds between two looks of the background; ``is_idle``: no data are under way."""
        if is_idle:
            shortest, longest = self._idle
            return min(longest, max(shortest, SHARE * quiet))
        return self._background[quiet >= LIVELY]


def cores_of_host() -> int:
    """The cores of this host, or as many of them as its ranks have by `CORES`.

    Raises:
        UserError: the variable holds something else than a positive number.
    """
    given = os.environ.get(CORES)
    if given is None:
        return os.cpu_count() or 1
    if not given.isdecimal() or int(given) < 1:
        raise UserError(
            f"{CORES}: expected the number of cores that the ranks of this host have, got "
            f"{given!r}; unset it to use all there are"
        )
    return int(given)
