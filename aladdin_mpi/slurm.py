"""``python -m aladdin_mpi.slurm init``: write the batch scripts for Slurm to a folder."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from aladdin_mpi.errors import UserError
from aladdin_mpi.process.files import write_whole

FOLDER = Path("slurm")
"""Folder in which the scripts find each other, unless ALADDIN_SLURM names another one."""


SOURCE = Path(__file__).parent / "slurm_scripts"
"""A link to ``slurm/`` in a checkout, a folder in an installed package."""


def scripts() -> dict[str, bytes]:
    """Return the content of every script by its path in the folder, such as ``sites/lumi.sh``."""
    files = sorted(path for path in SOURCE.rglob("*.s[bh]*") if path.is_file())
    return {path.relative_to(SOURCE).as_posix(): path.read_bytes() for path in files}


def write_scripts(folder: Path, replace: bool = False) -> list[Path]:
    """Write the scripts into ``folder``, and create it if necessary.

    Args:
        folder: the target; files with other names in it are not touched.
        replace: overwrite existing files that differ.

    Returns:
        The files that were written, without those that were identical already.

    Raises:
        UserError: without ``replace``, an existing file differs, and nothing was written; or the
            folder cannot be written.
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
                f"{', '.join(map(str, changed))}; choose another folder, or add --force to "
                "replace them"
            )
        for path, content in missing.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, content)
    except OSError as error:
        raise UserError(
            f"{folder}: cannot write {error.filename}: {error.strerror}. Choose another folder."
        ) from error
    return list(missing)


def _holds(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        written = write_scripts(arguments.folder, replace=arguments.force)
    except UserError as error:
        print(f"aladdin_mpi: error: {error}", file=sys.stderr)
        return 2
    _report(arguments.folder, written)
    return 0


def _parser() -> argparse.ArgumentParser:
    about = "Batch scripts for Slurm."
    parser = argparse.ArgumentParser("aladdin_mpi.slurm", description=about, allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    text = "write the batch scripts to a folder"
    init = commands.add_parser("init", help=text, description=f"{text.capitalize()}.")
    init.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=FOLDER,
        metavar="FOLDER",
        help=f"target folder (default: {FOLDER})",
    )
    init.add_argument("--force", action="store_true", help="overwrite existing files that differ")
    return parser


def _report(folder: Path, written: Sequence[Path]) -> None:
    for path in written:
        print(f"wrote {path}")
    if not written:
        print(f"{folder} is up to date")
    # A job knows the folder from which it was submitted, but not the one of its script.
    by_name = folder.resolve() == FOLDER.resolve()
    setting = "" if by_name else f"ALADDIN_SLURM={shlex.quote(str(folder.resolve()))} "
    script = shlex.quote(str(folder / "train.sbatch"))
    print(f"Set nodes, GPUs and time in {folder}/train.sbatch or pass them to sbatch, then run:")
    print(f"    {setting}sbatch {script} --epochs 5")


if __name__ == "__main__":
    raise SystemExit(main())
