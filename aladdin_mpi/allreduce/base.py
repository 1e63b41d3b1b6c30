"""What every way to sum gradients offers, and how those wait that MPI does not wait for."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from aladdin_mpi.errors import WaitTimeoutError
from aladdin_mpi.transport.base import Transport

LONGEST_NAP = 0.0002
"""Seconds of sleep, at most, between two looks at an operation of another library."""


class Pending(ABC):
    """A sum that is under way."""

    @abstractmethod
    def wait(self) -> Tensor:
        """Wait for the sum and return it; to be called once.

        It is in ``values``, or in memory that stays as it is until the next sum with this key
        begins; what ``values`` holds then is not said.

        The time goes to ``traffic.waiting``. On a GPU the sum is there for the
        current stream.

        Raises:
            WaitTimeoutError: it took longer than the transport's ``timeout``.
        """


class AllReduce(ABC):
    """Sums slices of the flat gradient over all ranks.

    Every rank starts the same slices in the same order, waits for all of them, and calls
    no collective of the transport in between.
    """

    name: str
    """``ring``, ``mpi``, ``horovod`` or ``torch``."""

    @abstractmethod
    def start(self, values: Tensor, key: int) -> Pending:
        """Begin to sum ``values`` over all ranks.

        Args:
            values: a contiguous fp32 slice of a flat vector, left alone until the
                sum is there, which may be put into it.
            key: the number of the bucket, not that of another sum under way.
        """

    @abstractmethod
    def describe(self) -> str:
        """What does the work, in a few words."""

    def abandon(self, dead: int) -> None:
        """That rank has died: who waits for a sum gets :class:`PeerFailedError`, and so on.

        Also called by handlers. Collectives end by themselves.
        """
        return

    def close(self) -> None:
        """End it, on every rank, when nothing is under way."""
        return


def timeout_of(transport: Transport) -> float | None:
    """The longest wait in seconds that the transport allows; None: no limit."""
    timeout: float | None = getattr(transport, "timeout", None)
    return timeout


def wait_until(done: Callable[[], bool], transport: Transport, what: str) -> None:
    """Sleep until ``done()``; the time goes to the transport's ``traffic.waiting``.

    Args:
        done: asks the library that does the work.
        transport: whose ``timeout`` limits the wait.
        what: is waited for, for the message.

    Raises:
        WaitTimeoutError: it took longer.
    """
    limit = timeout_of(transport)
    start = time.perf_counter()
    nap = 0.0
    try:
        while not done():
            if limit is not None and time.perf_counter() - start > limit:
                raise WaitTimeoutError(
                    f"rank {transport.rank} waited {limit:g} s for {what}: a rank hangs, has "
                    "died, or is slower than --timeout allows"
                )
            time.sleep(nap)
            nap = min(LONGEST_NAP, nap + LONGEST_NAP / 10)
    finally:
        transport.traffic.waiting += time.perf_counter() - start
