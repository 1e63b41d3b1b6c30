"""Work that one rank does for all ranks of its host.

The rank that locks a file first decodes or downloads; the others wait for the result. The locks
are the operating system's, so they are released when their owner ends.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from aladdin_mpi.process.files import written_whole

UInt8Array = npt.NDArray[np.uint8]

_log = logging.getLogger(__name__)


def cache_dir() -> Path:
    """Return ``$ALADDIN_MPI_CACHE``, or ``~/.cache/aladdin_mpi``; its files are disposable."""
    chosen = os.environ.get("ALADDIN_MPI_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "aladdin_mpi"


def index_dir(data: Path) -> Path:
    """Return the folder of the indices of ``data``.

    It is ``DIR.index`` next to a folder ``DIR`` with the data, if that exists; otherwise the cache
    folder. Local copies have such a folder, as their path refers to other data on other hosts.
    """
    candidates = (index_beside(each) for each in (data, *data.parents) if each.name)
    return next((each for each in candidates if each.is_dir()), cache_dir())


def index_beside(folder: Path) -> Path:
    """Return the path ``DIR.index`` for a folder ``DIR``."""
    return folder.with_name(f"{folder.name}.index")


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Let one process at a time into the block. Raises OSError if ``path`` cannot be locked."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")).acquire(poll_interval=0.2):
        yield


def cached_array(
    key: str, build: Callable[[], UInt8Array], folder: Path | None = None
) -> UInt8Array:
    """Return the result of ``build``, stored in ``folder``, by default the cache.

    The array is mapped from the file, so that the ranks of a host share its memory. If the cache
    cannot be used, the function warns, and builds the array for this process alone.
    """
    path = (folder or cache_dir()) / f"{key}.npy"
    try:
        if not path.exists():
            with one_at_a_time(path):
                if not path.exists():
                    array = build()
                    with written_whole(path) as temporary, temporary.open("wb") as file:
                        np.save(file, array)
                    _log.info("wrote %s (%.0f MB)", path, array.nbytes / 1e6)
        # Copy-on-write, although it is never written, because torch refuses read-only memory.
        return np.load(path, mmap_mode="c")
    except (OSError, NotImplementedError) as error:
        warnings.warn(
            f"cannot use the cache {path.parent} ({error}), so every rank decodes for itself. "
            "Set ALADDIN_MPI_CACHE to a writable folder.",
            stacklevel=2,
        )
        return build()
