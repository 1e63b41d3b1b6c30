"""Placement of a benchmark's ranks on the hosts, in the lab and in the simulator."""

from __future__ import annotations

from typing import Literal

Spread = Literal["cyclic", "block"]


def spread(servers: int) -> Spread:
    """Return the placement, as named by `aladdin_mpi.simulate`, for this number of servers.

    Servers are the first ranks. Assigned in turn, each host has equal numbers of servers and of
    workers. Without servers neighbours share a host, so that a ring leaves each of them once.
    """
    return "cyclic" if servers else "block"
