"""One way to sum what is short, another for what is long."""

from __future__ import annotations

from torch import Tensor

from aladdin_mpi.allreduce.base import AllReduce, Pending

SHORT = 512 * 1024
"""Bytes up to which MPI's own all-reduce is used between hosts. It takes fewer messages than a ring
(`benchmarks.allreduce --hosts 4 --ranks 4 8 --megabytes 0.1 1`): 100 KB took 1.9 ms and not 3.1
with a rank on each of four hosts, 7 ms and not 40 with two; 1 MB took as long, or longer."""


class BySize(AllReduce):
    """Sums of up to ``most`` bytes go through ``short``, others through ``long``."""

    def __init__(self, short: AllReduce, long: AllReduce, most: int = SHORT) -> None:
        self._short = short
        self._long = long
        self._most = most
        self.name = long.name

    def start(self, values: Tensor, key: int) -> Pending:
        """See :meth:`AllReduce.start`."""
        of = self._short if values.nbytes <= self._most else self._long
        return of.start(values, key)

    def describe(self) -> str:
        """See :meth:`AllReduce.describe`."""
        return f"{self._long.describe()}; up to {self._most >> 10} KB {self._short.describe()}"

    def abandon(self, dead: int) -> None:
        """See :meth:`AllReduce.abandon`."""
        self._short.abandon(dead)
        self._long.abandon(dead)

    def close(self) -> None:
        """See :meth:`AllReduce.close`."""
        self._short.close()
        self._long.close()
