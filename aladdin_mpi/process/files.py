"""Files that are there whole or not at all, whenever a process dies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Give a path beside ``path`` to write to, which takes its place at the end of the block.

    With an exception ``path`` stays as it was, and nothing is left beside it. The content is on
    disk before it gets its name, so that a power failure leaves no empty file under it either.

    Raises:
        OSError: it cannot be written.
    """
    # The ending stays: some writers choose the format by it.
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all. Raises OSError if it cannot be written."""
    with written_whole(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def write_new(path: Path, content: str) -> None:
    """Write a file whole or not at all, and never over one that is there.

    Raises:
        FileExistsError: there is one, also one that has come in the meantime.
        OSError: it cannot be written.
    """
    # Processes of several hosts, which number theirs alike, may write to one folder.
    temporary = path.with_name(f".{path.stem}.{uuid4().hex}.tmp")
    try:
        temporary.write_text(content, encoding="utf-8")
        _sync(temporary)
        os.link(temporary, path)  # unlike a rename it fails where there is a file
    finally:
        temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
