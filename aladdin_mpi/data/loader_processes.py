"""How processes that load data are started.

A forked process has all of its parent's memory, and of its threads the one that forked. MPI and
the drivers of devices have threads and memory of their own: a lock that one of these threads holds
is never released in the child, and memory that is registered with a network card may become the
child's. Most forks go well, and those that do not hang, or train on rubbish. So if MPI or a device
is in use, processes come from a fresh server (``forkserver``), or are fresh themselves
(``spawn``). These import the program's main file again, so that it needs
``if __name__ == "__main__":``, and receive the data set, which has to be picklable.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aladdin_mpi import accelerator
from aladdin_mpi.errors import UserError
from aladdin_mpi.process import console

FORK, FORKSERVER = "fork", "forkserver"
STARTS_MPI = "MPI4PY_RC_INITIALIZE"
"""Environment variable that tells mpi4py whether importing it starts MPI."""
PRELOADED = ["aladdin_mpi.data.loading"]
"""Imported by the server once for all processes; not the main file, which would run as a rank."""


@dataclass(frozen=True)
class Start:
    """The method, ``auto`` or one of Python's, and whether to warn of its risks."""

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
                warnings.filterwarnings("ignore", message=".*pickle error.*")  # reported below
                return iter(loader(method))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            if self.method == "auto":
                self._tell(f"the objects that load the data cannot be pickled ({error})")
                return iter(loader(FORK))
            raise UserError(
                f"--loader-start-method {method} requires a data set, collate_fn and "
                f"worker_init_fn that can be pickled ({error}). Define them at the top of a "
                "module, or use --loader-start-method fork."
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
            f"--loader-start-method {self.method} requires a main file that can be imported, but "
            f"{lacks}. Put the training code under such a line, or use --loader-start-method "
            "fork."
        )

    def _tell(self, why: str) -> None:
        if self.tells:
            console.say(
                "aladdin_mpi: warning: loader processes are forked although MPI or a device is "
                f"in use, because {why}; if they hang, see docs/troubleshooting.md"
            )


@contextmanager
def _no_mpi_in_children() -> Iterator[None]:
    """Keep a main file that imports mpi4py from starting MPI, as an existing rank."""
    before = os.environ.get(STARTS_MPI)
    os.environ[STARTS_MPI] = "0"
    try:
        yield
    finally:
        del os.environ[STARTS_MPI]
        if before is not None:
            os.environ[STARTS_MPI] = before


def is_loader_process() -> bool:
    """Whether this process was started to load data, and imports the main file for that."""
    # Python sets the second while the main file is imported.
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
    """Return the program's main file, if it would train again when it is imported."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None or not Path(path).is_file():
        return None  # nothing will be imported
    is_guarded = re.search(r"^if\b.*\b__name__\b", Path(path).read_text(errors="replace"), re.M)
    return None if is_guarded else Path(path)
