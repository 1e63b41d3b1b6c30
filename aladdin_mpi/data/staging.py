"""Data copied to a host's own disk before training, once for all ranks of the host.

A parallel file system serves a few large reads well and a million small ones badly, above all
when every epoch asks for them again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from aladdin_mpi.control.exchange import agree
from aladdin_mpi.data.host_cache import one_at_a_time
from aladdin_mpi.errors import UserError
from aladdin_mpi.process import console
from aladdin_mpi.transport.base import Transport

COPIES = 8
"""Files that are copied at a time."""
KEPT_FREE = 0.02
"""Share of the disk that is left alone."""
UNFINISHED = ".unfinished"


class File(NamedTuple):
    """Of the data: its path below their folder, its bytes, and when it was changed."""

    name: str
    size: int
    changed: int


def stage(
    transport: Transport, data_dir: Path | None, disk: Path | None, quiet: bool
) -> Path | None:
    """Copy ``data_dir`` to this host's ``disk``, if it has one; returns where the data are then.

    All ranks call it. What is there already is not copied again, and a file has its name when it is
    complete.

    Raises:
        UserError: there is nothing to copy, or no room.
    """
    if data_dir is None or disk is None:
        agree(transport, lambda: 0)
        return data_dir
    target = place(data_dir, disk)
    is_first = transport.rank == min(
        rank for rank in range(transport.size) if transport.hosts[rank] == transport.host
    )
    copied = agree(transport, lambda: copy(data_dir, target) if is_first else 0)
    if is_first and copied and not quiet:
        where = transport.host_name(transport.rank)
        console.say(f"aladdin_mpi: copied {copied / 1e9:.2f} GB to {target} of {where}")
    return target


def place(data_dir: Path, disk: Path) -> Path:
    """Where data lie on a disk: other folders of the same name lie elsewhere."""
    digest = hashlib.sha256(os.fsencode(data_dir.resolve())).hexdigest()[:8]
    return disk / f"{data_dir.resolve().name}-{digest}"


def copy(data_dir: Path, target: Path) -> int:
    """Copy what is not there yet; returns its bytes.

    Raises:
        UserError: see :func:`stage`.
    """
    files = list(listed(data_dir))
    if not files:
        raise UserError(f"--data-dir {data_dir}: expected files to copy by --stage, got none")
    try:
        with one_at_a_time(target):  # two jobs may share the host
            missing = [file for file in files if not _is_there(target, file)]
            _check_room(target, sum(file.size for file in missing))
            for folder in {(target / file.name).parent for file in missing}:
                folder.mkdir(parents=True, exist_ok=True)
            with ThreadPoolExecutor(COPIES) as pool:
                list(pool.map(lambda file: _copy(data_dir, target, file), missing))
    except OSError as error:
        raise UserError(
            f"--stage {target.parent}: cannot copy the data there ({error}); give a folder on the "
            "host's own disk that can be written, or leave the option out"
        ) from error
    return sum(file.size for file in missing)


def listed(data_dir: Path) -> Iterator[File]:
    """All files, those that links lead to among them."""
    for folder, _, names in os.walk(data_dir, followlinks=True):
        for name in names:
            path = Path(folder, name)
            state = path.stat()
            yield File(str(path.relative_to(data_dir)), state.st_size, int(state.st_mtime))


def _is_there(target: Path, file: File) -> bool:
    try:
        state = (target / file.name).stat()
    except OSError:
        return False
    return (state.st_size, int(state.st_mtime)) == (file.size, file.changed)


def _check_room(target: Path, needed: int) -> None:
    disk = shutil.disk_usage(target.parent)
    free = disk.free - int(KEPT_FREE * disk.total)
    if needed > free:
        raise UserError(
            f"--stage {target.parent}: expected {needed / 1e9:.1f} GB free, got {free / 1e9:.1f}; "
            "give a larger disk, or leave the option out"
        )


def _copy(data_dir: Path, target: Path, file: File) -> None:
    final = target / file.name
    partial = final.with_name(f"{final.name}{UNFINISHED}")
    shutil.copyfile(data_dir / file.name, partial)
    os.utime(partial, (file.changed, file.changed))
    partial.replace(final)
