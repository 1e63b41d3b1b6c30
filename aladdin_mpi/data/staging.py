"""Data copied to a host's own disk before training, once for all ranks of the host.

A parallel file system serves a few large reads well and a million small ones badly, above all
when every epoch asks for them again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from aladdin_mpi.control.exchange import all_or_none, broadcast, gather
from aladdin_mpi.data.host_cache import index_beside, one_at_a_time
from aladdin_mpi.errors import UserError
from aladdin_mpi.process import console
from aladdin_mpi.process.console import duration, number
from aladdin_mpi.transport.base import Transport

COPIES = 8
"""Files that are copied at a time."""
KEPT_FREE = 0.02
"""Share of the disk that is left alone."""
PIECE = 4 << 20
"""Bytes that are read at a time."""
UNFINISHED = ".unfinished"


class File(NamedTuple):
    """Of the data: its path below their folder, its bytes, and when it was changed."""

    name: str
    size: int
    changed: int


class FolderListing(NamedTuple):
    """What is in a folder, by paths below it."""

    files: list[File]
    folders: set[str]


class DiskCopy:
    """A copy of the folder ``source`` that becomes the folder ``target``.

    A file has its name when it is complete: an interrupted copy goes on where it was.

    Attributes:
        needed: bytes that have to be copied, as soon as that is known.
        copied: how many of them are.
        moves: rises as long as it goes on.
        is_stopped: set by another thread, it ends early.
    """

    def __init__(self, source: Path, target: Path) -> None:
        self.source = source
        self.target = target
        self.needed = self.copied = self.moves = 0
        self.is_stopped = False
        self._count = threading.Lock()

    def make(self) -> None:
        """Copy what is not there as it is in the source.

        Raises:
            UserError: there is nothing to copy, it cannot be read or written, or has no room.
        """
        option = f"--stage {self.target.parent}"
        if self.target.resolve().is_relative_to(self.source.resolve()):
            raise UserError(
                f"{option}: expected a folder outside of --data-dir {self.source}, got one in it; "
                "give a folder on the host's own disk"
            )
        try:
            with one_at_a_time(self.target):  # two jobs may share the host
                listing = self._listed()
                missing = [file for file in listing.files if not self._has(file)]
                self._prepare(listing, missing)
                with ThreadPoolExecutor(COPIES) as pool:
                    list(pool.map(self._copy, missing))
                index_beside(self.target).mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{option}: cannot copy {self.source} there ({error}); look at it, and give a "
                "folder on the host's own disk that can be written, or leave the option out"
            ) from error

    def _listed(self) -> FolderListing:
        found = FolderListing([], set())
        for folder, _, names in os.walk(self.source, followlinks=True):
            found.folders.add(os.path.relpath(folder, self.source))
            for name in names:
                found.files.append(self._described(Path(folder, name)))
                self._go_on()
        if not found.files:
            raise UserError(
                f"--data-dir {self.source}: expected files to copy by --stage, got none"
            )
        return found

    def _described(self, path: Path) -> File:
        try:
            state = path.stat()  # that of what a link leads to
        except OSError as error:
            raise UserError(
                f"--data-dir {self.source}: expected files to copy by --stage, got one that cannot "
                f"be read ({error}); repair or remove it"
            ) from error
        name = str(path.relative_to(self.source))
        return File(name, state.st_size, int(state.st_mtime))

    def _has(self, file: File) -> bool:
        self._go_on()
        try:
            state = (self.target / file.name).stat()
        except OSError:
            return False
        return (state.st_size, int(state.st_mtime)) == (file.size, file.changed)

    def _prepare(self, listing: FolderListing, missing: list[File]) -> None:
        """See that there is room, and make the folders.

        What the source no longer has would be trained on, as an image or a class too many.
        """
        for path in self._surplus(listing):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        self.needed = sum(file.size for file in missing)
        self._check_room()
        for folder in listing.folders:
            (self.target / folder).mkdir(parents=True, exist_ok=True)

    def _surplus(self, listing: FolderListing) -> Iterator[Path]:
        kept = listing.folders | {file.name for file in listing.files}
        for folder, folders, names in os.walk(self.target):
            inside = Path(os.path.relpath(folder, self.target))
            gone = [each for each in chain(folders, names) if str(inside / each) not in kept]
            folders[:] = [each for each in folders if each not in gone]
            yield from (Path(folder, each) for each in gone)

    def _check_room(self) -> None:
        disk = shutil.disk_usage(self.target.parent)
        free = max(0, disk.free - int(KEPT_FREE * disk.total))
        if self.needed > free:
            raise UserError(
                f"--stage {self.target.parent}: expected {number(self.needed / 1e9, 3)} GB free, "
                f"got {number(free / 1e9, 3)}; give a larger disk, or leave the option out"
            )

    def _copy(self, file: File) -> None:
        final = self.target / file.name
        partial = final.with_name(f"{final.name}{UNFINISHED}")
        partial.unlink(missing_ok=True)
        with (self.source / file.name).open("rb") as old, partial.open("xb") as new:
            while piece := old.read(PIECE):
                new.write(piece)
                with self._count:
                    self.copied += len(piece)
                self._go_on()
            if new.tell() != file.size:
                raise OSError(f"{self.source / file.name} has changed meanwhile")
        os.utime(partial, (file.changed, file.changed))
        partial.replace(final)

    def _go_on(self) -> None:
        self.moves += 1
        if self.is_stopped:
            raise InterruptedError("stopped")


MOST_APART = 10.0
"""Seconds after which ranks hear of each other again."""
TOLD_EVERY = 60.0
"""Seconds."""


def stage(
    transport: Transport, data_dir: Path | None, disk: Path | None, timeout: float, quiet: bool
) -> Path | None:
    """Copy ``data_dir`` to this host's ``disk``, if it has one; returns where the data are then.

    All ranks call it. It may take longer than ``timeout``, as long as something is copied.

    Raises:
        UserError: there is nothing to copy, no room, or nothing moves for ``timeout`` seconds.
    """
    target, copying = data_dir, None
    if data_dir is not None and disk is not None:
        target = place(data_dir, disk)
        if transport.rank == transport.hosts.index(transport.host):
            copying = _Copying(DiskCopy(data_dir, target), timeout)
    try:
        _wait_for_all(transport, copying, min(MOST_APART, timeout / 4), None if quiet else target)
    finally:
        if copying is not None:
            copying.close()
    return target


def place(data_dir: Path, disk: Path) -> Path:
    """Where data lie on a disk: other folders of the same name lie elsewhere."""
    digest = hashlib.sha256(os.fsencode(data_dir.resolve())).hexdigest()[:8]
    return disk / f"{data_dir.resolve().name}-{digest}"


def _wait_for_all(
    transport: Transport, copying: _Copying | None, pause: float, told_of: Path | None
) -> None:
    """Until the hosts' copies are complete. No rank waits for another for longer than a pause."""
    start = told = time.monotonic()
    busy = True
    while busy:
        has_ended = all_or_none(transport, lambda: copying is None or copying.has_ended(pause))
        copy = copying.copy if copying is not None else None
        mine = [not has_ended, copy.copied, copy.needed] if copy is not None else None
        hosts = [each for each in gather(transport, mine) if each is not None]
        busy = broadcast(transport, any(is_busy for is_busy, *_ in hosts))
        copied, needed = (sum(each[i] for each in hosts) for i in (1, 2))
        now = time.monotonic()
        if not copied or told_of is None or (busy and now - told < TOLD_EVERY):
            continue
        told = now
        of = f" of {_gigabytes(needed)}" if busy else ""
        where = f" of {len(hosts)} hosts" if len(hosts) > 1 else ""
        console.say(
            f"aladdin_mpi: copied {_gigabytes(copied)}{of} to {told_of}{where} in "
            f"{duration(now - start)}"
        )


def _gigabytes(count: int) -> str:
    return f"{number(count / 1e9, 3)} GB"


class _Copying:
    """A copy under way in a thread.

    Args:
        copy: to be made.
        timeout: seconds for which nothing may move.
    """

    def __init__(self, copy: DiskCopy, timeout: float) -> None:
        self.copy = copy
        self._timeout = timeout
        self._seen = -1
        self._since = time.monotonic()
        self._problem: BaseException | None = None
        # It may wait for another job, or a file system that hangs; the program's end does not.
        self._thread = threading.Thread(target=self._run, name="aladdin_mpi staging", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.copy.make()
        except BaseException as problem:
            self._problem = problem

    def has_ended(self, seconds: float) -> bool:
        """Wait for its end for ``seconds``.

        Raises:
            UserError: it could not be made, or does not go on.
        """
        self._thread.join(seconds)
        if not self._thread.is_alive():
            if self._problem is not None:
                raise self._problem
            return True
        now = time.monotonic()
        if self.copy.moves != self._seen:
            self._seen, self._since = self.copy.moves, now
        elif now - self._since > self._timeout:
            raise UserError(
                f"--stage {self.copy.target.parent}: expected the copy to go on, got nothing for "
                f"{self._timeout:g} s; another job copies the same data there, or a file system "
                "hangs: look at both, or give a longer --timeout"
            )
        return False

    def close(self) -> None:
        """Copy no more."""
        self.copy.is_stopped = True
