"""How processes that load data are started.

A process that is forked has all of its parent's memory, and of its threads the one that forked.
MPI and the drivers of devices have threads and memory of their own: a lock that one of these
threads holds is never released in the child, and memory that a network card has been told of may
be the child's afterwards. Most forks go well, and those that do not hang, or train on rubbish. So
where MPI or a device is in use, processes come from a server that was started afresh
(``forkserver``), or are started afresh themselves (``spawn``). These import the program's main
file again, so that it has to have ``if __name__ == "__main__":``, and are sent the data set, which
has to be picklable.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch

from aladdin_mpi import accelerator
from aladdin_mpi.errors import UserError
from aladdin_mpi.process import console

FORK, FORKSERVER = "fork", "forkserver"
STARTS_MPI = "MPI4PY_RC_INITIALIZE"
"""The environment's word to mpi4py whether importing it starts MPI."""
PRELOADED = ["aladdin_mpi.data.loading"]
"""What the server of processes imports once for all of them; not the main file, which it would run
without being told apart from a rank."""


@dataclass(frozen=True)
class ProcessArguments:
    """Arguments of a user's DataLoader for the processes that load its samples.

    Attributes:
        timeout: seconds that a batch may take, 0 for no limit.
        prefetch_factor: batches that each process loads ahead; None: torch's default.
        worker_init_fn: called in each process with its number before it loads.
        seed: of the random numbers that the processes begin with, and differ in.
    """

    timeout: float = 0
    prefetch_factor: int | None = None
    worker_init_fn: Callable[[int], object] | None = None
    seed: int = 0


@dataclass(frozen=True)
class Start:
    """The method, ``auto`` or one of Python's, and whether to say what speaks against it."""

    method: str = FORK
    tells: bool = False

    def start(self, loader: Callable[[str], Any]) -> Iterator[Any]:
        """Iterate over a DataLoader that ``loader`` makes for a method.

        Raises:
            UserError: the program, or what it loads, does not allow the method.
        """
        method = self._chosen()
        if method == FORK:
            return iter(loader(FORK))
        if method == FORKSERVER:
            multiprocessing.set_forkserver_preload(PRELOADED)
        try:
            with warnings.catch_warnings(), _no_mpi_in_children():
                warnings.filterwarnings("ignore", message=".*pickle error.*")  # it is told below
                return iter(loader(method))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            if self.method == "auto":
                self._tell(f"what loads the data cannot be pickled ({error})")
                return iter(loader(FORK))
            raise UserError(
                f"--loader-start-method {method}: expected a data set and a collate_fn (and "
                f"worker_init_fn) that can be pickled, got {error}; define them at the top of a "
                "module, or use --loader-start-method fork"
            ) from error

    def _chosen(self) -> str:
        if self.method == FORK or (self.method == "auto" and not _is_fork_dangerous()):
            return FORK
        main = _unguarded_main()
        if main is None:
            return FORKSERVER if self.method == "auto" else self.method
        lacks = f'{main.name} has no line `if __name__ == "__main__":`'
        if self.method == "auto":
            self._tell(lacks)
            return FORK
        raise UserError(
            f"--loader-start-method {self.method}: expected a program whose main file can be "
            f"imported, but {lacks}; put what trains under one, or use --loader-start-method fork"
        )

    def _tell(self, why: str) -> None:
        if self.tells:
            console.say(
                "aladdin_mpi: loader processes are forked although MPI or a device is in use, "
                f"since {why}; if they hang, see docs/data.md"
            )


@contextmanager
def _no_mpi_in_children() -> Iterator[None]:
    """Keep a main file that imports mpi4py from starting MPI, as a rank that there is already."""
    before = os.environ.get(STARTS_MPI)
    os.environ[STARTS_MPI] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[STARTS_MPI]
        else:
            os.environ[STARTS_MPI] = before


def is_loader_process() -> bool:
    """Whether this process was started to load data, and imports the main file for that."""
    # The second is Python's own sign of it while the main file is imported.
    process = multiprocessing.current_process()
    return multiprocessing.parent_process() is not None or getattr(process, "_inheriting", False)


def _is_fork_dangerous() -> bool:
    """Whether MPI or a device is in use in this process."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        return True
    kind = accelerator.kind()
    return kind is not None and bool(getattr(torch, kind).is_initialized())


def _unguarded_main() -> Path | None:
    """The program's main file, if it would train again where it is imported."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None or not Path(path).is_file():
        return None  # nothing will be imported
    is_guarded = re.search(r"^if\b.*\b__name__\b", Path(path).read_text(errors="replace"), re.M)
    return None if is_guarded else Path(path)


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
