"""No rank may leave the others hanging: an error anywhere ends the whole job."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from types import FrameType

from aladdin_mpi.errors import (
    SUSPENDED_STATUS,
    RefusedError,
    SuspendedError,
    UserError,
    system_error,
)

FLUSH_SECONDS = 0.3
"""Time for the launcher to pass on what was printed before the job is ended."""


class TerminatedError(BaseException):
    """SIGTERM or SIGINT has come; clean up and go."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def run_guarded(main: Callable[[], int]) -> int:
    """Run a command's ``main``; on an error say it once and end the job on every rank.

    Returns its status, if there is no error. Imports belong inside ``main``, so that
    an error in them is caught as well.
    """
    install()
    try:
        return main()
    except BaseException as error:
        end_job(error)
        raise AssertionError("unreachable") from error


def install() -> None:
    """Make every uncaught error of this process end the whole job."""
    sys.excepthook = lambda kind, error, trace: end_job(error)
    threading.excepthook = lambda args: end_job(args.exc_value or SystemExit(1))
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
        signal.signal(signal.SIGINT, _terminate)


def _terminate(signum: int, frame: FrameType | None) -> None:
    # A second signal ends the process at once, whatever it is cleaning up.
    signal.signal(signum, signal.SIG_DFL)
    raise TerminatedError(signum)


def end_job(error: BaseException) -> None:
    """Say what has happened and end the job on every rank; does not return."""
    rank, size = launched_place()
    status = 1
    if isinstance(error, SuspendedError):
        leave(SUSPENDED_STATUS)
    elif isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if status == 0:
            leave(0)
    elif isinstance(error, RefusedError):
        leave(0)  # the status is that of the rank which says why
    elif isinstance(error, TerminatedError):
        status = 128 + error.signum
        if rank == 0:
            print(f"aladdin_mpi: stopped by {error}", file=sys.stderr)
    elif isinstance(error, UserError):
        status = 2
        where = f" (rank {rank})" if size > 1 and not error.agreed else ""
        print(f"aladdin_mpi: error{where}: {error}", file=sys.stderr)
        if error.agreed:
            leave(status)
    elif (full := system_error(error)) and full.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" (rank {rank})" if size > 1 else ""
        print(
            f"aladdin_mpi: error{where}: {full}; make room there, then go on from the last "
            "checkpoint with --resume",
            file=sys.stderr,
        )
    else:
        _print_traceback(error, rank, size)
    _abort(status, size)


def _print_traceback(error: BaseException, rank: int, size: int) -> None:
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    mark = f"[rank {rank}] " if size > 1 else ""
    print("".join(mark + line for line in lines.splitlines(keepends=True)), file=sys.stderr)


def launched_place() -> tuple[int, int]:
    """Rank and size, as the launcher tells them if MPI has not started; (0, 1) without one."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        return mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
    for rank, size in (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
        ("SLURM_PROCID", "SLURM_NTASKS"),
    ):
        if rank in os.environ:
            return int(os.environ[rank]), int(os.environ.get(size, "1"))
    return 0, 1


def _abort(status: int, size: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    if size > 1:
        time.sleep(FLUSH_SECONDS)
        try:
            from mpi4py import MPI

            MPI.COMM_WORLD.Abort(status)
        except ImportError:
            pass  # the launcher ends the job when a process exits with an error
    os._exit(status)


def leave(status: int) -> None:
    """Exit when every rank does so by itself; does not return."""
    sys.stdout.flush()
    sys.stderr.flush()
    if threading.current_thread() is threading.main_thread():
        # Open MPI ends the others as soon as the first has left with an error.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and not mpi.Is_finalized():
        mpi.Finalize()
    os._exit(status)


@contextmanager
def quiet_unless_first(rank: int) -> Iterator[None]:
    """Print nothing but on rank 0, while all ranks do the same."""
    if rank == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield
