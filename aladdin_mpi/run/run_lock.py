"""One run at a time in a folder: two that write there would destroy each other's results."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from pathlib import Path
from typing import IO, Any

from aladdin_mpi.errors import UserError
from aladdin_mpi.process import guard, plain_json
from aladdin_mpi.process.files import open_own

NAME = ".lock"
"""The file that a run holds locked while it writes."""
HELD = (errno.EACCES, errno.EAGAIN)
"""What a lock answers that another process has; a file system without locks answers otherwise."""
NAMING_SECONDS = 1.0
"""Longest time between taking the lock and writing into its file who has it."""


class RunLock:
    """Held by rank 0 until :meth:`release`, or until its process ends, however it does.

    The lock is the operating system's and of the kind that a fork does not inherit (POSIX,
    fcntl(2)): a data loader's process that outlives a killed rank does not keep it.
    """

    def __init__(self, file: IO[str] | None) -> None:
        self._file = file
        self._process = os.getpid()

    def release(self) -> None:
        """Let others use the folder; harmless when done before, and in a fork."""
        if self._file is None or os.getpid() != self._process:
            return
        if _is_there(self._file):
            os.unlink(self._file.name)
        self._file.close()
        self._file = None


def take(folder: Path) -> RunLock:
    """Take the folder for this run; where files cannot be locked it goes on without.

    A job that its batch system has started again takes the folder from its own last start: a
    file server may not know yet that the host is gone which held it.

    Raises:
        UserError: another run is using it, or the lock's file is a symbolic link.
    """
    path = folder.absolute() / NAME  # the program may go elsewhere
    try:
        file = open(path, "a+", opener=lambda _, flags: open_own(path, flags))  # noqa: SIM115
    except OSError:
        return RunLock(None)  # who writes there will say so
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = _owner(file) if error.errno in HELD else {}
        file.close()
        if not owner:
            return RunLock(None)
        if _is_earlier_start(owner):
            (folder / NAME).unlink(missing_ok=True)
            return take(folder)
        raise UserError(
            f"--run-dir: expected a folder that no other run is using, got {str(folder)!r}, where "
            f"process {owner.get('pid')} on {owner.get('host')} is writing; wait for its end, or "
            f"give another folder (if it has ended for certain, remove {folder / NAME})"
        ) from None
    if not _is_there(file):  # who had it has just removed it
        file.close()
        return take(folder)
    file.truncate(0)
    file.write(plain_json.written(_myself()))
    file.flush()
    lock = RunLock(file)
    guard.before_leaving(lock.release)  # no file is left by a run that is refused
    return lock


def _is_there(file: IO[str]) -> bool:
    """Whether the file still has its name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
    except FileNotFoundError:
        return False


def _myself() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "job": os.environ.get("SLURM_JOB_ID"),
        "start": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
    }


def _owner(file: IO[str]) -> dict[str, Any]:
    """Who has the lock; nothing if nobody has written it down."""
    deadline = time.monotonic() + NAMING_SECONDS
    while True:
        file.seek(0)
        try:
            found: dict[str, Any] = plain_json.read(file.read())
            return found
        except ValueError:
            if time.monotonic() > deadline:
                return {}
            time.sleep(0.05)


def _is_earlier_start(owner: dict[str, Any]) -> bool:
    mine = _myself()
    return bool(mine["job"]) and mine["job"] == owner.get("job") and mine["start"] > owner["start"]
