"""Start methods of loader processes.

A forked process has a copy of its parent's memory, but only the thread that forked. MPI and device
drivers have threads and registered memory: a lock held by one of these threads is never released
in the child, and memory that is registered with a network card may end up in the child. Most forks
succeed; others hang, or read corrupt data. So if MPI or a device is in use, processes are forked
from a clean server (``forkserver``) or started from scratch (``spawn``). These import the program's
main file again, which therefore needs ``if __name__ == "__main__":``, and receive the dataset,
which must be picklable.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import sys
import tempfile
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
"""Environment variable that sets whether importing mpi4py starts MPI."""
LONGEST_TEMPORARY = 107 - len("/pymp-12345678/listener-12345678")
"""Longest path in which multiprocessing can make a Unix socket (unix(7): 107 characters)."""
PRELOADED = ["aladdin_mpi.data.loading"]
"""Modules that the server imports once for all processes, without the main file."""


@dataclass(frozen=True)
class Start:
    """The start method, ``auto`` or one of Python's, and whether to warn of its risks."""

    method: str = FORK
    warns: bool = False

    def start(self, loader: Callable[[str], Any]) -> Iterator[Any]:
        """Return an iterator over the DataLoader that ``loader`` makes for a method.

        Raises:
            UserError: the program or the dataset does not support the method, or TMPDIR is too
                long.
        """
        _check_temporary_path()
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
                self._warn(f"the objects that load the data cannot be pickled ({error})")
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
            self._warn(lacks)
            return FORK
        raise UserError(
            f"--loader-start-method {self.method} requires a main file that can be imported, but "
            f"{lacks}. Put the training code under such a line, or use --loader-start-method "
            "fork."
        )

    def _warn(self, why: str) -> None:
        if self.warns:
            console.say(
                "aladdin_mpi: warning: loader processes are forked although MPI or a device is "
                f"in use, because {why}; if they hang, see docs/troubleshooting.md"
            )


def _check_temporary_path() -> None:
    """Check that Python can make its sockets, without which the first batch never arrives."""
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > LONGEST_TEMPORARY:
        raise UserError(
            f"--loader-workers requires a folder for temporary files whose path has at most "
            f"{LONGEST_TEMPORARY} characters, because loader processes use Unix sockets, got "
            f"{folder!r}. Set TMPDIR to a shorter path, such as /tmp."
        )


@contextmanager
def _no_mpi_in_children() -> Iterator[None]:
    """Prevent a main file that imports mpi4py from starting MPI as an existing rank."""
    before = os.environ.get(STARTS_MPI)
    os.environ[STARTS_MPI] = "0"
    try:
        yield
    finally:
        del os.environ[STARTS_MPI]
        if before is not None:
            os.environ[STARTS_MPI] = before


def is_loader_process() -> bool:
    """Return whether this is a loader process, which may be importing the main file."""
    # Python sets `_inheriting` while the main file is imported.
    process = multiprocessing.current_process()
    return multiprocessing.parent_process() is not None or getattr(process, "_inheriting", False)


def _is_fork_dangerous() -> bool:
    """Return whether MPI or a device is in use in this process."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        return True
    kind = accelerator.kind()
    return kind is not None and bool(getattr(torch, kind).is_initialized())


def _unguarded_main() -> Path | None:
    """Return the program's main file if importing it would start training again."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None or not Path(path).is_file():
        return None  # no file will be imported
    is_guarded = re.search(r"^if\b.*\b__name__\b", Path(path).read_text(errors="replace"), re.M)
    return None if is_guarded else Path(path)
