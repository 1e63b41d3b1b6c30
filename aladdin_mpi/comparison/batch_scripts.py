"""The batch scripts for Slurm that come with the package, and how to write them out."""

from __future__ import annotations

import os
from pathlib import Path

from aladdin_mpi.errors import UserError
from aladdin_mpi.process.files import write_whole

SOURCE = Path(__file__).parent.parent / "slurm_scripts"
"""A link to ``slurm/`` in a checkout, a folder of its own where the package is installed."""


def scripts() -> dict[str, bytes]:
    """The content of every script, by its path inside the folder, such as ``sites/lumi.sh``."""
    files = sorted(path for path in SOURCE.rglob("*.s[bh]*") if path.is_file())
    return {path.relative_to(SOURCE).as_posix(): path.read_bytes() for path in files}


def write(folder: Path, replace: bool = False) -> list[Path]:
    """Write the scripts into ``folder``, which is made if need be.

    Args:
        folder: where to; files of other names in it are left alone.
        replace: also write over files that are there and differ.

    Returns:
        The files that were written; those that were there already and are the same are not.

    Raises:
        UserError: without ``replace``, a file is there and differs, and nothing was written; or
            the folder cannot be written.
    """
    try:
        missing = {
            folder / name: content
            for name, content in scripts().items()
            if not _holds(folder / name, content)
        }
        changed = [path for path in missing if os.path.lexists(path)]
        if changed and not replace:
            raise UserError(
                f"{folder}: expected no other files of the same names, got "
                f"{', '.join(map(str, changed))}; give another folder, or add --force to "
                "replace them"
            )
        for path, content in missing.items():
            _write(path, content)
    except OSError as error:
        raise UserError(
            f"{folder}: cannot write {error.filename}: {error.strerror}; give another folder"
        ) from error
    return list(missing)


def _holds(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content)
