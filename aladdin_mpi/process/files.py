"""Atomic writing of files, and JSON without NaN."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path
from typing import Any
from uuid import uuid4

from aladdin_mpi.errors import UserError


def written(value: Any, indent: int | None = None) -> str:
    """Return ``value`` as JSON, with null for numbers that are not finite."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def read(text: str | bytes) -> Any:
    """Parse JSON; the NaN and infinite values of older files become None.

    Raises:
        ValueError: the text is not JSON.
    """
    return json.loads(text, parse_constant=lambda _: None)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield an empty file next to ``path`` that replaces it at the end of the block.

    After an exception, ``path`` is unchanged, and no other file remains. The content is on disk
    before the file is renamed, so that a power failure leaves no empty file. If ``path`` is a link,
    the link is replaced. Raises OSError if the file cannot be written.
    """
    # The suffix is kept because some writers select the format by it.
    with _temporary(path, path.suffix) as temporary:
        yield temporary
        _sync(temporary)
        temporary.replace(path)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically. Raises OSError if it cannot be written."""
    with written_whole(path) as temporary:
        temporary.write_bytes(_utf8(content) if isinstance(content, str) else content)


def _utf8(text: str) -> bytes:
    """Return valid UTF-8, also of paths with bytes that are invalid in the program's locale."""
    return text.encode(errors="surrogateescape").decode(errors="replace").encode()


def write_new(path: Path, content: str) -> None:
    """Write a file atomically, without replacing an existing one.

    Raises:
        FileExistsError: the file exists, even if it was created in the meantime.
        OSError: it cannot be written.
    """
    with _temporary(path) as temporary:
        temporary.write_text(content, encoding="utf-8")
        _sync(temporary)
        os.link(temporary, path)  # unlike a rename, it fails if the file exists


def shown(path: Path) -> Path:
    """Return an absolute path relative to the current folder, if it is in there."""
    with suppress(OSError, ValueError):  # the current folder has been deleted, or is another
        return path.relative_to(Path.cwd())
    return path


def open_own(path: Path, flags: int) -> int:
    """Open a file, and create it if it is missing; ``flags`` as for ``os.open``.

    Raises:
        UserError: it is a symbolic link.
        OSError: it cannot be opened.
    """
    try:
        return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _is_link(path, "a file") from None
        raise


def append(path: Path, content: str | bytes) -> None:
    """Append to a file, and create it if it is missing. Raises the errors of :func:`open_own`."""
    with open(open_own(path, os.O_WRONLY | os.O_APPEND), "ab") as file:
        file.write(content.encode() if isinstance(content, str) else content)


def check_own_folder(path: Path) -> None:
    """Raise UserError if a folder that the program manages is a symbolic link."""
    if path.is_symlink():
        raise _is_link(path, "a folder")


def remove_tree(path: Path) -> None:
    """Remove a folder with its contents, a file, or only a link. Raises OSError on failure."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def _is_link(path: Path, kind: str) -> UserError:
    return UserError(
        f"{path}: expected {kind}, got a symbolic link, which is not followed because anyone may "
        "have put it there; remove it"
    )


@contextmanager
def _temporary(path: Path, ending: str = "") -> Iterator[Path]:
    """Create an empty file with a random name next to ``path``, for the block.

    Process numbers would not be unique if several hosts write to one folder.
    """
    temporary = path.with_name(f".{path.stem}.{uuid4().hex}.tmp{ending}")
    temporary.touch(exist_ok=False)  # O_EXCL: never through a link
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
