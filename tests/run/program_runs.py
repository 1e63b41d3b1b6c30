"""Run the programs of ``programs/`` as users run their scripts: under mpirun, or directly."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.launch import ROOT, Completed, environment, run_ranks

PROGRAMS = Path(__file__).with_name("programs")
HERE = {"PYTHONPATH": str(ROOT), "ALADDIN_MPI_TEST": "own loop"}
"""The environment of programs that run outside the project's folder."""


def program(name: str) -> str:
    """Return the path of a program in ``programs/``."""
    return str(PROGRAMS / f"{name}.py")


def run_program(folder: Path, name: str, *args: object, ranks: int = 3, **how: Any) -> Completed:
    """Run ``mpirun -n RANKS python NAME.py ARGS`` in ``folder``; ``how`` as for ``run_ranks``."""
    words = [program(name), *map(str, args)]
    return run_ranks(ranks, words, **{"env": HERE, "cwd": folder, **how})


def run_alone(folder: Path, name: str, *args: object, command: Sequence[str] = ()) -> Completed:
    """Run ``python NAME.py ARGS`` in ``folder``, in one process.

    Args:
        folder: the working directory.
        name: the program's name.
        args: the program's arguments.
        command: arguments of Python before the program, such as ``["-m", "aladdin_mpi.simulate"]``.
    """
    ended = subprocess.run(
        [sys.executable, *command, program(name), *map(str, args)],
        cwd=folder,
        env=environment("openmpi", HERE),
        capture_output=True,
        text=True,
        timeout=120,
    )
    return Completed(ended.returncode, ended.stdout, ended.stderr, 0.0)


def run_script(tmp_path: Path, text: str, ranks: int = 3, **how: Any) -> Completed:
    """Run a short script with the content ``text``."""
    file = tmp_path / "script.py"
    file.write_text(text)
    return run_ranks(ranks, [str(file)], env=HERE, cwd=tmp_path, **how)
