"""The next batches, loaded by a thread while the last one is computed with.

Only where that pays: a thread and its hand-overs cost a fraction of a millisecond, and batches that
are made faster are made when they are asked for. And only where it is safe: see
:attr:`Loader.draws`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from time import perf_counter
from typing import Any, Protocol

import torch

AHEAD = 2
"""Batches loaded ahead: one more than is needed, for data that take longer now and then."""
TRIALS = 3
"""Batches that are loaded when they are asked for, to see how long that takes."""
THREAD = "aladdin_mpi loader"
LEAST_SECONDS = 0.002
"""That a batch has to take."""


class How(Enum):
    """How a batch is loaded."""

    ALONE = "alone"
    """While the training waits."""
    TRIAL = "trial"
    """The same, and it is noted whether samples draw random numbers."""
    BESIDE = "beside"
    """While the training goes on, in another thread."""


class Loader(Protocol):
    """Makes batches of lists of samples."""

    draws: bool
    """Whether a sample, on trial, has drawn from the process's global random generators.

    Those belong to the training meanwhile: what draws from them cannot be loaded beside it.
    """

    def load(self, keys: Any, how: How) -> Any:
        """A batch."""


class LoadAhead:
    """Iterates over batches, in order.

    Args:
        keys: of each batch; taken by the thread that asks for batches.
        loader: makes the batches.
    """

    def __init__(self, keys: Iterator[Any], loader: Loader) -> None:
        self._keys = keys
        self._loader = loader
        self._trials: list[float] = []
        self._thread: ThreadPoolExecutor | None = None
        self._coming: deque[Future[Any]] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if len(self._trials) < TRIALS:
            return self._try()
        if self._thread is None:
            return self._loader.load(next(self._keys), How.ALONE)
        if not self._coming:
            self._fill()
        batch = self._coming.popleft().result()
        self._fill()
        return batch

    def _try(self) -> Any:
        start = perf_counter()
        batch = self._loader.load(next(self._keys), How.TRIAL)
        self._trials.append(perf_counter() - start)
        if len(self._trials) == TRIALS and self._pays:
            # It has one core: the others compute. torch keeps the number for each thread.
            self._thread = ThreadPoolExecutor(1, THREAD, torch.set_num_threads, (1,))
            self._fill()
        return batch

    @property
    def _pays(self) -> bool:
        return min(self._trials) >= LEAST_SECONDS and not self._loader.draws

    def _fill(self) -> None:
        assert self._thread is not None
        while len(self._coming) < AHEAD:
            keys = next(self._keys)
            self._coming.append(self._thread.submit(self._loader.load, keys, How.BESIDE))

    def close(self) -> None:
        """Load no more."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
