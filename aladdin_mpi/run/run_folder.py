"""The folder of a run: created by rank 0, visible to all ranks."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from aladdin_mpi.control.exchange import all_or_none, broadcast
from aladdin_mpi.errors import UserError
from aladdin_mpi.hooks.checkpoints import FOLDER as CHECKPOINT
from aladdin_mpi.hooks.checkpoints import CheckpointStore
from aladdin_mpi.hooks.recorder import METRICS, TENSORBOARD
from aladdin_mpi.options.general import LENGTHS
from aladdin_mpi.options.run import CONFIG_NAME, RESIZE_FIELDS, SUMMARY, RunOptions
from aladdin_mpi.options.settings import build
from aladdin_mpi.options.toml_file import read_toml, to_toml
from aladdin_mpi.process import console, files, guard
from aladdin_mpi.process.files import check_own_folder, open_own, write_whole
from aladdin_mpi.run import trained_model
from aladdin_mpi.run.report import CURVES
from aladdin_mpi.transport.base import Transport

NAME = ".lock"
"""The file that a run locks while it writes."""
REQUEST = ".join"
"""The file in the folder of a run by which another job requests it; see :mod:`.handover`."""
HELD = (errno.EACCES, errno.EAGAIN)
"""Error codes of a lock that another process holds; a file system without locks has others."""
NAMING_SECONDS = 1.0
"""Longest time between acquiring the lock and writing its owner into the file, in seconds."""


class RunLock:
    """A lock that rank 0 holds until :meth:`release`, or until its process ends in any way.

    It is a POSIX lock of the operating system (fcntl(2)), which a fork does not inherit: a data
    loader's process that outlives a killed rank does not keep it.
    """

    def __init__(self, file: IO[str] | None) -> None:
        self._file = file
        self._process = os.getpid()

    def release(self) -> None:
        """Release the folder; do nothing if it is released already, or in a forked process."""
        if self._file is None or os.getpid() != self._process:
            return
        if _still_named(self._file):
            os.unlink(self._file.name)
        self._file.close()
        self._file = None


def take(folder: Path) -> RunLock:
    """Lock the folder for this run; continue without a lock if files cannot be locked.

    A job that its batch system has restarted takes the lock over from its previous start, because
    a file server may not have detected yet that the previous host has failed.

    Raises:
        UserError: another run is using the folder, or the lock file is a symbolic link.
    """
    path = folder.absolute() / NAME  # the program may change its working directory
    try:
        file = open(path, "a+", opener=lambda _, flags: open_own(path, flags))  # noqa: SIM115
    except OSError:
        return RunLock(None)  # the first write there reports the error
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = _owner(file) if error.errno in HELD else {}
        file.close()
        if not owner:
            return RunLock(None)
        mine = _myself()
        if mine["job"] and mine["job"] == owner.get("job") and mine["start"] > owner["start"]:
            path.unlink(missing_ok=True)
            return take(folder)
        raise UserError(
            f"--run-dir: {str(folder)!r} is in use by process {owner.get('pid')} on "
            f"{owner.get('host')}. Wait until it ends, or choose another folder. If it has "
            f"certainly ended, remove {folder / NAME}."
        ) from None
    if not _still_named(file):  # the previous owner has just removed it
        file.close()
        return take(folder)
    file.truncate(0)
    file.write(files.written(_myself()))
    file.flush()
    lock = RunLock(file)
    guard.before_leaving(lock.release)  # a refused run leaves no lock file
    with suppress(OSError):
        (folder / REQUEST).unlink()  # now this job has the run
    return lock


CLAIM = ".claim-{}"
"""The file of :func:`claim`, with the number of the group."""


def claim(folder: Path, group: int) -> bool:
    """Claim the run for this side of a cut link; return whether the other has not done so.

    Both sides see the folder, or else only one of them can write to it.

    Args:
        folder: the run's folder.
        group: number of the group of ranks that the link divides.
    """
    path = folder / CLAIM.format(group)
    try:
        path.touch(exist_ok=False)
    except OSError:  # it exists; or the disk is full, which must not end the run
        return not path.exists()
    return True


def drop_claims(folder: Path) -> None:
    """Remove the claims of earlier jobs."""
    for path in folder.glob(CLAIM.format("*")):
        path.unlink(missing_ok=True)


def is_in_use(folder: Path) -> bool:
    """Return whether another process has locked the folder."""
    try:
        with open(folder.absolute() / NAME, "r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in HELD
    return False


def _still_named(file: IO[str]) -> bool:
    """Return whether the open file still has its name."""
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
    """Return the owner in the lock file; empty if it has none."""
    deadline = time.monotonic() + NAMING_SECONDS
    while True:
        file.seek(0)
        try:
            owner: dict[str, Any] = files.read(file.read())
            return owner
        except ValueError:
            if time.monotonic() > deadline:
                return {}
            time.sleep(0.05)


MODELS = (trained_model.FILE, trained_model.FOLDER, trained_model.UNFINISHED)
WRITTEN = (CONFIG_NAME, METRICS, SUMMARY, *MODELS, CURVES, CHECKPOINT)
"""Files that a run writes, which its folder must not contain at the start."""
EVENTS = "events.*"
"""TensorBoard's files, which it must not contain either."""


@dataclass(frozen=True)
class OpenFolder:
    """The folder of a run, which no other run may use.

    Attributes:
        lock: at rank 0.
    """

    path: Path
    lock: RunLock | None

    def release(self) -> None:
        """Allow other runs to use the folder."""
        if self.lock is not None:
            self.lock.release()


def open_for(transport: Transport, options: RunOptions) -> OpenFolder:
    """Create or open the folder of a run, and lock it. Every rank calls it.

    Raises:
        UserError, RefusedError: it cannot be used, or is not visible to every rank.
    """
    first, given = transport.rank == 0, options.resume or options.run_dir
    if given is None:
        given = all_or_none(transport, lambda: make_new(options) if first else None)
    # A script may put the time into the name, and change its current folder later.
    folder = Path(broadcast(transport, str(given))).absolute()

    def lock_folder() -> RunLock | None:
        if not first:
            return None
        _check_name(folder)
        if options.resume is not None and not os.access(folder, os.W_OK):
            raise UserError(
                f"--resume: {folder} is read-only, or another user's. Make it writable, or resume "
                "a copy of it."
            )
        lock = prepare(folder, options) if options.resume is None else take(folder)
        drop_claims(folder)
        return lock

    lock = all_or_none(transport, lock_folder)
    all_or_none(transport, lambda: _check_visible(folder))
    return OpenFolder(folder, lock)


def _check_name(folder: Path) -> None:
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"--run-dir: expected a path in UTF-8, got {str(folder)!r}. Rename the folder, or set "
            "LC_ALL=C.UTF-8 if its name is in UTF-8."
        ) from None


def _check_visible(folder: Path) -> None:
    if not (folder / CONFIG_NAME).is_file():
        raise UserError(
            f"--run-dir: {str(folder)!r} was made by rank 0 and is not visible here. Choose a "
            "folder on a file system that all hosts share."
        )


def make_new(options: RunOptions) -> Path:
    """Create ``ALGORITHM-MODEL-DATASET-TIME``, with a number if another run has just created it.

    Raises:
        UserError: it cannot be created.
    """
    parts = options.algorithm, options.model, options.dataset, time.strftime("%Y%m%d-%H%M%S")
    name = "-".join(parts).replace("/", "_").replace(":", "_")
    folder, number = Path("runs") / name, 1
    while True:
        try:
            folder.mkdir(parents=True)  # succeeds for only one of several runs
            return folder
        except FileExistsError:
            number += 1
            folder = folder.with_name(f"{name}-{number}")
        except OSError as error:
            raise _not_written(folder, error) from error


def take_over(transport: Transport, folder: Path) -> OpenFolder:
    """Open the folder of a run whose former rank 0 has failed."""
    lock = None
    if transport.rank == 0:
        # An excluded rank that hangs may still hold the lock, but writes no more.
        with suppress(UserError):
            lock = take(folder)
    return OpenFolder(folder, lock)


def prepare(folder: Path, options: RunOptions) -> RunLock:
    """Create the folder, lock it for this run, and write the configuration into it.

    Raises:
        UserError: it holds a run already, another run is using it, or it cannot be written.
    """
    used = [name for name in WRITTEN if (folder / name).exists()]
    used += [TENSORBOARD] if any((folder / TENSORBOARD).glob(EVENTS)) else []
    if used and not options.overwrite:
        resume = f", or resume it with --resume {folder}" if CONFIG_NAME in used else ""
        raise UserError(
            f"--run-dir: expected a new folder, got {str(folder)!r}, which holds a run already, "
            f"or files of the same names ({', '.join(used)}); choose another, or add --overwrite "
            f"to replace it{resume}"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = take(folder)
        for own in (CHECKPOINT, TENSORBOARD):
            check_own_folder(folder / own)
        for name in set(used).difference([CHECKPOINT, TENSORBOARD]):
            if name in MODELS and (folder / name).is_dir() and not (folder / name).is_symlink():
                shutil.rmtree(folder / name)
            else:
                (folder / name).unlink()
        for old in (folder / TENSORBOARD).glob(EVENTS):
            old.unlink()
        for old in CheckpointStore(folder).all():
            shutil.rmtree(old, ignore_errors=True)
        write_whole(folder / CONFIG_NAME, f"# {_command()}\n{to_toml(options)}")
    except OSError as error:
        raise _not_written(folder, error) from error
    return lock


def _command() -> str:
    """Return the command line that started this program, with the number of its ranks."""
    # A simulation has one process, even in the environment of a job with several.
    ranks = guard.launched_place()[1] if "mpi4py.MPI" in sys.modules else 1
    start = ["mpirun", "-np", str(ranks)] if ranks > 1 else []
    return console.command_line([*start, "python", *sys.orig_argv[1:]])


def _not_written(folder: Path, error: OSError) -> UserError:
    path = Path(str(error.filename or folder))
    at = f" ({path.name})" if path.parent == folder else ""
    return UserError(
        f"--run-dir: cannot write into {str(folder)!r}: {error.strerror}{at}. Choose another "
        "folder."
    )


def reopen(folder: Path, options: RunOptions) -> None:
    """Remove the summary of a resumed run, and store the length and ranks requested now."""
    (folder / SUMMARY).unlink(missing_ok=True)
    config = folder / CONFIG_NAME
    stored = build(type(options), read_toml(type(options), config, "--resume"))
    names = {*LENGTHS, *(RESIZE_FIELDS if options.allow_resize else ())}
    now = {name: getattr(options, name) for name in names if name in type(options).model_fields}
    if any(getattr(stored, name) != value for name, value in now.items()):
        command = config.read_text().partition("\n")[0]
        write_whole(config, f"{command}\n{to_toml(stored.model_copy(update=now))}")
