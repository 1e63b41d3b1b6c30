"""Data copied to a host's own disk before training, once for all ranks of the host.

A parallel file system serves a few large reads well and a million small ones badly, above all
when every epoch asks for them again.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path

from aladdin_mpi.control.exchange import agree, broadcast, gather
from aladdin_mpi.data.disk_copy import DiskCopy
from aladdin_mpi.errors import UserError
from aladdin_mpi.process import console
from aladdin_mpi.process.units import duration, number
from aladdin_mpi.transport.base import Transport

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
        has_ended = agree(transport, lambda: copying is None or copying.has_ended(pause))
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
