"""How the ranks of a benchmark fill the hosts, in the lab and in virtual time alike."""

from __future__ import annotations

from typing import Literal

Spread = Literal["cyclic", "block"]


def spread(servers: int) -> Spread:
    """The placement, as `aladdin_mpi.simulate` names it, of a job with so many servers.

    Servers are the first ranks: dealt in turn they, and as many workers, come to each host.
    Without servers neighbours share a host, so that a ring leaves each of them once.
    """
    return "cyclic" if servers else "block"
