"""The folder of a comparison: whose it is, and who is at work in it."""

from __future__ import annotations

import fcntl
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aladdin_mpi.comparison.options import PROG, CompareOptions, Request
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.settings import build, read_toml, to_toml
from aladdin_mpi.process.files import open_own, write_whole

MANIFEST = "comparison.toml"
LOCK = ".lock"
LOCK_SECONDS = 15.0
"""Runs of a comparison that was killed end by themselves, within this time."""
FIXED = ("engine", "workers")
"""What a comparison cannot change when it goes on; each run's options are checked as well."""


def command_line(request: Request) -> str:
    """The command that was typed."""
    return shlex.join(["python", "-m", PROG, *request.words])


def check_out(out: Path, options: CompareOptions) -> None:
    """Refuse a folder that belongs to something else.

    Raises:
        UserError: it holds other files, or another comparison.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"--out: expected a folder, got the file {str(out)!r}; give another")
    if not (out / MANIFEST).is_file():
        others = sorted(path.name for path in out.iterdir() if path.name != LOCK)
        if others:
            raise UserError(
                f"--out: expected a new or empty folder or that of a comparison, got {str(out)!r}, "
                f"which holds {', '.join(others[:5])} and no {MANIFEST}; give another"
            )
        return
    stored = build(CompareOptions, read_toml(CompareOptions, out / MANIFEST, "--out"))
    wrong = [
        f"{name}: {getattr(stored, name)} and {getattr(options, name)}"
        for name in FIXED
        if getattr(stored, name) != getattr(options, name)
    ]
    if bool(stored.read) != bool(options.read):
        wrong.append("with and without --read")
    if wrong:
        raise UserError(
            f"--out: {str(out)!r} holds another comparison (its value first): {'; '.join(wrong)}; "
            "give another --out"
        )


@contextmanager
def claimed(out: Path, request: Request) -> Iterator[int]:
    """Make the folder, keep other comparisons out of it; gives the lock's descriptor.

    Children inherit it: the folder stays locked until the last of them has ended,
    even where the comparison itself was killed.

    Raises:
        UserError: it cannot be written, or another comparison is at work there, or the lock's
            file is a symbolic link.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = open_own(out / LOCK, os.O_RDWR)
    except OSError as error:
        raise UserError(
            f"--out: cannot write into {str(out)!r}: {error.strerror}; give another folder"
        ) from error
    try:
        end = time.monotonic() + LOCK_SECONDS
        while not _try_lock(descriptor):
            if time.monotonic() > end:
                raise UserError(
                    f"--out: another comparison is at work in {str(out)!r}; wait for its end, or "
                    "give another --out"
                )
            time.sleep(0.1)
        text = f"# {command_line(request)}\n{to_toml(request.options)}"
        write_whole(out / MANIFEST, text)
        yield descriptor
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
