"""A folder's copy on another disk: what differs is copied, what is not in the folder removed."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from aladdin_mpi.data.host_cache import index_beside, one_at_a_time
from aladdin_mpi.errors import UserError
from aladdin_mpi.process.units import number

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


class Listing(NamedTuple):
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

    def _listed(self) -> Listing:
        found = Listing([], set())
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

    def _prepare(self, listing: Listing, missing: list[File]) -> None:
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

    def _surplus(self, listing: Listing) -> Iterator[Path]:
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
