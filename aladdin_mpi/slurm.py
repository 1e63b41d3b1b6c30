"""``python -m aladdin_mpi.slurm init``: the batch scripts for Slurm, written to a folder."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from aladdin_mpi.comparison import batch_scripts
from aladdin_mpi.errors import UserError

FOLDER = Path("slurm")
"""Where the scripts look for each other, unless ALADDIN_SLURM names another folder."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    asked = _parser().parse_args(argv)
    try:
        written = batch_scripts.write(asked.folder, replace=asked.force)
    except UserError as error:
        print(f"aladdin_mpi: error: {error}", file=sys.stderr)
        return 2
    _tell(asked.folder, written)
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
        help=f"where to (default: {FOLDER})",
    )
    init.add_argument(
        "--force", action="store_true", help="replace files that are there and differ"
    )
    return parser


def _tell(folder: Path, written: Sequence[Path]) -> None:
    for path in written:
        print(f"wrote {path}")
    if not written:
        print(f"{folder} has all of them already")
    # A job knows the folder that it was submitted from, but not that of its script.
    by_name = folder.resolve() == FOLDER.resolve()
    setting = "" if by_name else f"ALADDIN_SLURM={shlex.quote(str(folder.resolve()))} "
    script = shlex.quote(str(folder / "train.sbatch"))
    print(f"Set nodes, GPUs and time in {folder}/train.sbatch, or give them to sbatch. Then:")
    print(f"    {setting}sbatch {script} --algorithm aladdin --epochs 5")


if __name__ == "__main__":
    raise SystemExit(main())
