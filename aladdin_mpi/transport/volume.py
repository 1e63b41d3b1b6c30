"""What a collective is taken to send where the library under it does not tell.

A convention, not a measurement: MPI, Horovod, gloo and NCCL choose their algorithm by size,
number of ranks and network. What is counted is what each rank sends at least in an algorithm
that loads all ranks alike, as the ring does (Patarasuk and Yuan, J. Parallel Distrib. Comput.
69, 2009). In virtual time nothing is assumed: the messages themselves are counted.
"""

from __future__ import annotations


def allreduce_bytes(nbytes: int, ranks: int) -> int:
    """2(n-1)/n of the buffer: a reduce-scatter, then an all-gather of the parts."""
    return 2 * nbytes * (ranks - 1) // ranks


def allgather_bytes(nbytes: int, ranks: int) -> int:
    """n-1 times one rank's buffer: everyone's part passes through every rank but one."""
    return nbytes * (ranks - 1)


def alltoall_bytes(nbytes: int, ranks: int) -> int:
    """(n-1)/n of the buffer: all parts but the rank's own."""
    return nbytes * (ranks - 1) // ranks


def broadcast_bytes(nbytes: int, ranks: int) -> int:
    """(n-1)/n of the buffer for each rank: n-1 ranks receive it whole, whoever sends it on."""
    return nbytes * (ranks - 1) // ranks
