"""The names of the files below a folder, found once for each host.

A folder of a million images on a parallel file system takes minutes to walk through. What was found
is kept where :func:`.index_dir` says, with the time at which each folder in it was changed: as long
as these are the same, no file has come, gone or been renamed.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from aladdin_mpi.data.host_cache import index_dir, one_at_a_time
from aladdin_mpi.process.files import written_whole

UNSURE = 2.0
"""Seconds within which a folder may change again without its time telling."""


class Found(NamedTuple):
    """``names`` of files and of all ``folders``, below the root; when each of these was changed."""

    names: list[str]
    folders: list[str]
    changed: list[int]


def files_below(root: Path, is_wanted: Callable[[str], bool]) -> list[str]:
    """Return the files below ``root``, class folder by class folder, sorted.

    Args:
        root: holds the class folders; files in itself do not count.
        is_wanted: whether a file of this name does; the same at every call.
    """
    resolved = root.resolve()
    digest = hashlib.sha256(os.fsencode(resolved)).hexdigest()[:32]
    path = index_dir(resolved) / f"folder-{digest}.npz"
    asked = time.time_ns()
    try:
        with one_at_a_time(path):  # the other ranks of the host wait, and then read
            looked = time.time_ns()
            kept = _load(path)
            if kept is not None and _is_just_seen(path, root, kept, asked):
                return kept.names
            if kept is not None and _is_current(root, kept):
                _note(path, looked)
                return kept.names
            found = _walk(root, is_wanted)
            if max(found.changed, default=0) < (time.time() - UNSURE) * 1e9:
                _save(path, found)
                _note(path, looked)
    except OSError:  # a cache that cannot be written
        return _walk(root, is_wanted).names
    return found.names


def _walk(root: Path, is_wanted: Callable[[str], bool]) -> Found:
    names: list[str] = []
    folders, changed = ["."], [root.stat().st_mtime_ns]
    with os.scandir(root) as entries:
        classes = sorted(entry.name for entry in entries if entry.is_dir())
    for name in classes:
        found = []
        for folder, _, files in os.walk(root / name):
            inside = os.path.relpath(folder, root)
            folders.append(inside)
            changed.append(os.stat(folder).st_mtime_ns)
            found += [f"{inside}/{each}" for each in files if is_wanted(each)]
        names += sorted(found)
    return Found(names, folders, changed)


def _is_current(root: Path, kept: Found) -> bool:
    try:
        now = [(root / folder).stat().st_mtime_ns for folder in kept.folders]
    except OSError:
        return False
    return now == kept.changed


def _note(path: Path, looked: int) -> None:
    """Keep, as the time of the index, when a rank has begun to look at the folders."""
    os.utime(path, ns=(looked, looked))


def _is_just_seen(path: Path, root: Path, kept: Found, asked: int) -> bool:
    """Whether another rank has looked while this one waited.

    One of another host, with the same cache folder, may have looked at another disk.
    """
    return path.stat().st_mtime_ns >= asked and root.stat().st_mtime_ns == kept.changed[0]


def _save(path: Path, found: Found) -> None:
    with written_whole(path) as temporary, temporary.open("wb") as file:
        np.savez(
            file,
            names=_packed(found.names),
            folders=_packed(found.folders),
            changed=np.array(found.changed, dtype=np.int64),
        )


def _load(path: Path) -> Found | None:
    try:
        with np.load(path) as kept:
            names, folders = (list(_unpacked(kept[name])) for name in ("names", "folders"))
            return Found(names, folders, kept["changed"].tolist())
    except (OSError, ValueError, KeyError, BadZipFile):
        return None


def _packed(names: list[str]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"\0".join(map(os.fsencode, names)), dtype=np.uint8)


def _unpacked(data: npt.NDArray[np.uint8]) -> Iterator[str]:
    text = data.tobytes()
    return map(os.fsdecode, text.split(b"\0")) if text else iter(())
