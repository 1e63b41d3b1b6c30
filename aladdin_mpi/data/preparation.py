"""Preparation of the data before training: copies on the hosts' local disks, and image checks.

A parallel file system serves a few large reads well, but millions of small ones badly, especially
if every epoch repeats them. So ``--stage`` copies the data once for all ranks of a host, and with
``--check-images`` one rank reads each image.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path

from aladdin_mpi.control.exchange import all_or_none, broadcast, gather
from aladdin_mpi.data import imagefolder
from aladdin_mpi.data.host_cache import index_beside, one_at_a_time
from aladdin_mpi.data.imagefolder import Fault, SplitListing
from aladdin_mpi.data.loader_processes import Start
from aladdin_mpi.data.loading import load_in_order
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.run import RunOptions
from aladdin_mpi.process import console
from aladdin_mpi.process.console import duration, number
from aladdin_mpi.process.files import remove_tree
from aladdin_mpi.transport.base import Transport

COPIES = 8
"""Number of files that are copied at the same time."""
KEPT_FREE = 0.02
"""Share of the disk that is kept free."""
PIECE = 4 << 20
"""Bytes per read."""
UNFINISHED = ".unfinished"
State = tuple[int, int]
"""A file's size in bytes, and the time of its last change in seconds."""


def _state_of(path: Path) -> State:
    state = path.stat()  # of a link's target
    return state.st_size, int(state.st_mtime)


class DiskCopy:
    """A copy of the folder ``source`` as the folder ``target``.

    Files get their names when they are complete, so that an interrupted copy can be continued.

    Attributes:
        needed: bytes to copy, once known.
        copied: bytes copied.
        moves: counter that increases while the copy progresses.
        is_stopped: set by another thread to end the copy early.
    """

    def __init__(self, source: Path, target: Path) -> None:
        self.source = source
        self.target = target
        self.needed = self.copied = self.moves = 0
        self.is_stopped = False
        self._count = threading.Lock()
        self._option = f"--stage {target.parent}"
        self._problem: BaseException | None = None
        self._seen, self._since = -1, time.monotonic()

    def make(self) -> None:
        """Copy the files that differ from the source.

        Raises:
            UserError: no files to copy, an error in reading or writing, or a full disk.
        """
        if self.target.resolve().is_relative_to(self.source.resolve()):
            raise UserError(
                f"{self._option}: expected a folder outside --data-dir {self.source}, got one in "
                "it; choose a folder on the host's own disk"
            )
        try:
            with one_at_a_time(self.target):  # two jobs may share the host
                files, folders = self._listed()
                missing = {name: files[name] for name in files if not self._has(name, files[name])}
                self._prepare(missing, folders | files.keys(), folders)
                with ThreadPoolExecutor(COPIES) as pool:
                    list(pool.map(self._copy, missing, missing.values()))
                index_beside(self.target).mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{self._option}: cannot copy {self.source} there ({error}). Choose a writable "
                "folder on the host's own disk, or leave the option out."
            ) from error

    def _listed(self) -> tuple[dict[str, State], set[str]]:
        """Return the files and the folders of the source, by relative paths."""
        files, folders = {}, set()
        for folder, _, names in os.walk(self.source, followlinks=True):
            inside = Path(os.path.relpath(folder, self.source))
            folders.add(str(inside))
            for name in names:
                self._progress()
                try:
                    files[str(inside / name)] = _state_of(Path(folder, name))
                except OSError as error:
                    raise UserError(
                        f"--data-dir {self.source}: a file to copy by --stage cannot be read "
                        f"({error}). Repair or remove it."
                    ) from error
        if not files:
            raise UserError(
                f"--data-dir {self.source}: expected files to copy by --stage, got none; check "
                "the path"
            )
        return files, folders

    def _has(self, name: str, state: State) -> bool:
        self._progress()
        try:
            return _state_of(self.target / name) == state
        except OSError:
            return False

    def _prepare(self, missing: dict[str, State], known: set[str], folders: set[str]) -> None:
        """Check the free space, create folders, and remove files that the source does not have.

        Training would use leftover files as additional images or classes.
        """
        for folder, inner, names in os.walk(self.target):
            inside = Path(os.path.relpath(folder, self.target))
            gone = [each for each in chain(inner, names) if str(inside / each) not in known]
            inner[:] = [each for each in inner if each not in gone]
            for each in gone:
                remove_tree(Path(folder, each))
        self.needed = sum(size for size, _ in missing.values())
        disk = shutil.disk_usage(self.target.parent)
        free = max(0, disk.free - int(KEPT_FREE * disk.total))
        if self.needed > free:
            raise UserError(
                f"{self._option}: expected {_gigabytes(self.needed)} free, got "
                f"{number(free / 1e9, 3)}; choose a larger disk, or leave the option out"
            )
        for folder in folders:
            (self.target / folder).mkdir(parents=True, exist_ok=True)

    def _copy(self, name: str, state: State) -> None:
        size, changed = state
        source, final = self.source / name, self.target / name
        partial = final.with_name(f"{final.name}{UNFINISHED}")
        partial.unlink(missing_ok=True)
        with source.open("rb") as old, partial.open("xb") as new:
            while piece := old.read(PIECE):
                new.write(piece)
                with self._count:
                    self.copied += len(piece)
                self._progress()
            if new.tell() != size:
                raise OSError(f"{source} changed while it was copied")
        os.utime(partial, (changed, changed))
        partial.replace(final)

    def _progress(self) -> None:
        self.moves += 1
        if self.is_stopped:
            raise InterruptedError("stopped")

    def start(self) -> None:
        """Start the copy in a thread."""
        # A daemon, as it may wait for another job, or for a file system that hangs.
        self._thread = threading.Thread(target=self._run, name="aladdin_mpi staging", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.make()
        except BaseException as problem:
            self._problem = problem

    def has_ended(self, seconds: float, timeout: float) -> bool:
        """Wait up to ``seconds``; return whether the copy is complete.

        Raises:
            UserError: the copy failed, or has not progressed for ``timeout`` seconds.
        """
        self._thread.join(seconds)
        if not self._thread.is_alive():
            if self._problem is not None:
                raise self._problem
            return True
        now = time.monotonic()
        if self.moves != self._seen:
            self._seen, self._since = self.moves, now
        elif now - self._since > timeout:
            raise UserError(
                f"{self._option}: no progress of the copy for {timeout:g} s, because another job "
                "copies the same data there, or a file system hangs. Check both, or increase "
                "--timeout."
            )
        return False


MOST_APART = 10.0
"""Most seconds between two messages among ranks."""
REPORT_EVERY = 60.0
"""Seconds between two reports."""


def stage(
    transport: Transport, data_dir: Path | None, disk: Path | None, timeout: float, quiet: bool
) -> Path | None:
    """Copy ``data_dir`` to this host's ``disk``, if it has one; return the folder to read from.

    All ranks call it. It may take longer than ``timeout`` while the copy progresses.

    Raises:
        UserError: no files to copy, a full disk, or no progress for ``timeout`` seconds.
    """
    target, copy = data_dir, None
    if data_dir is not None and disk is not None:
        target = place(data_dir, disk)
        if transport.rank == transport.hosts.index(transport.host):
            copy = DiskCopy(data_dir, target)
            copy.start()
    try:
        _wait_for_all(transport, copy, timeout, None if quiet else target)
    finally:
        if copy is not None:
            copy.is_stopped = True
    return target


def place(data_dir: Path, disk: Path) -> Path:
    """Return the folder of the copy on a disk; it is unique for the path of ``data_dir``."""
    digest = hashlib.sha256(os.fsencode(data_dir.resolve())).hexdigest()[:8]
    return disk / f"{data_dir.resolve().name}-{digest}"


def _wait_for_all(
    transport: Transport, copy: DiskCopy | None, timeout: float, reported: Path | None
) -> None:
    """Wait for the hosts' copies; no rank waits for another one longer than a pause."""
    pause = min(MOST_APART, timeout / 4)
    start = reported_at = time.monotonic()
    busy = True
    while busy:
        has_ended = all_or_none(transport, lambda: copy is None or copy.has_ended(pause, timeout))
        mine = [not has_ended, copy.copied, copy.needed] if copy is not None else None
        hosts = [each for each in gather(transport, mine) if each is not None]
        busy = broadcast(transport, any(is_busy for is_busy, *_ in hosts))
        copied, needed = (sum(each[i] for each in hosts) for i in (1, 2))
        now = time.monotonic()
        if not copied or reported is None or (busy and now - reported_at < REPORT_EVERY):
            continue
        reported_at = now
        of = f" of {_gigabytes(needed)}" if busy else ""
        where = f" of {len(hosts)} hosts" if len(hosts) > 1 else ""
        console.say(
            f"aladdin_mpi: copied {_gigabytes(copied)}{of} to {reported}{where} in "
            f"{duration(now - start)}"
        )


def _gigabytes(count: int) -> str:
    return f"{number(count / 1e9, 3)} GB"


# -- images that cannot be read -----------------------------------------------------------------
AT_A_TIME = 64
"""Images that a loader process reads per report."""
MOST_NAMED = 1000


def check_images(options: RunOptions, transport: Transport) -> tuple[Fault, ...] | None:
    """Return the unreadable images, on all ranks; None without ``--check-images``.

    Raises:
        UserError: at rank 0, with all unreadable images, unless they are to be skipped.
        RefusedError: at the other ranks in this case.
    """
    if not options.check_images:
        return None
    listings, _ = all_or_none(transport, lambda: imagefolder.list_splits(options.data_dir))
    count = sum(len(listing.names) for listing in listings)
    if transport.rank == 0 and not options.quiet:
        console.say(f"--check-images: reading {count} images", sys.stdout)
    mine = all_or_none(transport, lambda: _faults(listings, options, transport))
    gathered = [each for part in gather(transport, mine) for each in part or ()]
    faults = tuple(sorted(Fault(*each) for each in broadcast(transport, gathered)))
    if faults and options.corrupt_images == "stop":
        all_or_none(transport, lambda: _refuse(listings, faults, count))
    return faults


def _faults(
    listings: Sequence[SplitListing], options: RunOptions, transport: Transport
) -> list[Fault]:
    """Return the unreadable images of this rank's part: every n-th image."""
    places = [
        (split, index)
        for split, listing in enumerate(listings)
        for index in range(transport.rank, len(listing.names), transport.size)
    ]
    pieces = [places[i : i + AT_A_TIME] for i in range(0, len(places), AT_A_TIME)]
    start = Start(options.loader_start_method, warns=transport.rank == 0)
    check = partial(_faults_among, listings)
    loaded = load_in_order(check, pieces, options.loader_workers, start)
    return [each for piece in loaded for each in piece]


def _faults_among(
    listings: Sequence[SplitListing], places: Sequence[tuple[int, int]]
) -> list[Fault]:
    reasons = ((place, imagefolder.fault(listings[place[0]].path(place[1]))) for place in places)
    return [Fault(*place, why) for place, why in reasons if why is not None]


def _refuse(listings: Sequence[SplitListing], faults: Sequence[Fault], count: int) -> None:
    named = [f"\n  {listings[each.split].path(each.place)}: {each.why}" for each in faults]
    more = f"\n  and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    raise UserError(
        f"--check-images: {len(faults)} of {count} images cannot be read; replace or remove "
        f"them, or add --corrupt-images skip:{''.join(named[:MOST_NAMED])}{more}"
    )
