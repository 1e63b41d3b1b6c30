"""Handover of a run to another job: the running one saves it and ends, the other resumes it.

Jobs cannot be merged: few MPIs connect two of them, and none of those with ULFM. So the new job is
started with all ranks that the run is to have, and the two communicate through the run's folder.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from aladdin_mpi.control.budget import WorkerReport
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.run import CONFIG_NAME
from aladdin_mpi.process import console, files
from aladdin_mpi.process.files import shown
from aladdin_mpi.run import run_folder
from aladdin_mpi.session.coordinator import Coordinator, RunHook

LOOK_SECONDS = 2.0
"""Seconds between two looks for a request, a file that may be on a busy server."""
WAIT_SECONDS = 0.2


class Handover(RunHook):
    """A hook that suspends the run when another job requests it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / run_folder.REQUEST
        self._next = 0.0

    def on_report(self, run: Coordinator, report: WorkerReport) -> None:
        """Look for a request from time to time."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + LOOK_SECONDS
        with suppress(OSError, ValueError, LookupError, TypeError):
            request = files.read(self._path.read_text())
            run.suspend(f"--join of a job of {request['ranks']} ranks on {request['host']}")


def receive(folder: Path, ranks: int, timeout: float, quiet: bool = False) -> None:
    """Request a run from the job that trains it, if any, and wait until that has ended.

    The request remains until this job has locked the folder, so that the other job's batch script
    does not requeue it.

    Args:
        folder: of the run.
        ranks: the number of ranks of this job.
        timeout: longest wait in seconds.
        quiet: print nothing.

    Raises:
        UserError: the folder contains no run, cannot be written, or stays in use.
    """
    if not (folder / CONFIG_NAME).is_file():
        raise UserError(
            f"--join: expected the folder of a run, got {str(folder)!r}, which has no "
            f"{CONFIG_NAME}; check the path"
        )
    if not run_folder.is_in_use(folder):
        return
    if not quiet:
        console.say(f"aladdin_mpi: waiting until the run in {shown(folder)} is saved")
    request = {"host": socket.gethostname(), "pid": os.getpid(), "ranks": ranks}
    path, end = folder / run_folder.REQUEST, time.monotonic() + timeout
    try:
        files.write_whole(path, files.written(request))
        while run_folder.is_in_use(folder):
            if time.monotonic() > end:
                raise UserError(
                    f"--join: the run in {str(folder)!r} has not ended within {timeout:g} s. Its "
                    "steps or checkpoints take longer than that: increase --timeout."
                )
            time.sleep(WAIT_SECONDS)
    except OSError as error:
        raise UserError(
            f"--join: cannot write into {str(folder)!r}: {error.strerror}. Make it writable."
        ) from error
    except BaseException:
        path.unlink(missing_ok=True)
        raise
