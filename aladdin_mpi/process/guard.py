"""No rank may leave the others hanging: an error anywhere ends the whole job."""

from __future__ import annotations

import atexit
import errno
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import FrameType

from aladdin_mpi.errors import (
    SUSPENDED_STATUS,
    ClosedError,
    ExcludedError,
    LostError,
    PeerFailedError,
    RefusedError,
    SuspendedError,
    UserError,
    system_error,
)
from aladdin_mpi.process import console

FLUSH_SECONDS = 0.3
"""Time for the launcher to pass on what was printed before the job is ended."""
YIELD_SECONDS = 3.0
"""Time for another rank to say what has happened."""
TURN_SECONDS = 1.0
"""Time for a worker to say what has gone wrong and to end the job, before the next one does."""
AGAIN = "start the job again"
"""The remedy where a rank is lost before the run has begun."""
LAST_TURN = 3
"""In a large job the ranks from here on do not wait for each other."""

remedy: Callable[[], str] = str
"""Says how to go on after the job has ended in mid-training."""
_last: list[Callable[[], None]] = []
_LIBRARY = Path(os.__file__).parent
_ending = threading.Lock()


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


_terminated: TerminatedError | None = None


def install() -> None:
    """Make every uncaught error of this process end the whole job."""
    if _is_interactive():
        return
    sys.excepthook = lambda kind, error, trace: end_job(error)
    threading.excepthook = _end_in_thread
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
        # A script that is alone may catch KeyboardInterrupt to end its training early.
        if launched_place()[1] > 1:
            signal.signal(signal.SIGINT, _terminate)


def _is_interactive() -> bool:
    """Whether this is a notebook or a prompt, where errors and Ctrl-C do not end the process."""
    return launched_place()[1] == 1 and (hasattr(sys, "ps1") or bool(sys.flags.interactive))


def _end_in_thread(args: threading.ExceptHookArgs) -> None:
    # As in any program sys.exit() ends no more than a thread of the user's; see no_exit for ours.
    if not isinstance(args.exc_value, SystemExit):
        end_job(args.exc_value or SystemExit(1))


@contextmanager
def no_exit() -> Iterator[None]:
    """Make a call of ``sys.exit`` in the user's code an error, whatever its status.

    A rank that leaves in the middle of a run leaves the others waiting, and says nothing.

    Raises:
        UserError: it was called; says where.
    """
    try:
        yield
    except SuspendedError:
        raise
    except SystemExit as error:
        raise exit_called(error) from error


def exit_called(error: SystemExit) -> UserError:
    """Says where ``sys.exit`` was called in the middle of a run."""
    given = "" if error.code is None else repr(error.code)
    return UserError(
        f"{_place(error)}: expected code that goes on or raises an error while the run goes on, "
        f"got a call of sys.exit({given}), which would leave other ranks waiting; raise an error "
        "in its place"
    )


def _place(error: SystemExit) -> str:
    """Where it was raised: the innermost line that is not Python's own, such as argparse's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if Path(each.filename).parent != _LIBRARY]
    last = (own or frames)[-1]
    return f"{last.filename}, line {last.lineno}, in {last.name}"


def _terminate(signum: int, frame: FrameType | None) -> None:
    # A second signal ends the process at once, whatever it is cleaning up.
    signal.signal(signum, signal.SIG_DFL)
    global _terminated
    _terminated = TerminatedError(signum)
    raise _terminated


def warn(texts: Iterable[str]) -> None:
    """Say what the user should know although the run goes on; on one rank."""
    for text in texts:
        console.say(f"aladdin_mpi: warning: {text}")


def end_job(error: BaseException) -> None:
    """Say what has happened and end the job on every rank; does not return."""
    if not _ending.acquire(blocking=False):  # it is never released
        time.sleep(2 * YIELD_SECONDS)  # who came first ends the process meanwhile
        os._exit(1)
    if threading.current_thread() is threading.main_thread():
        # The others are ended by the launcher, and so is this one: it has its say first.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    console.close()  # what is said now is not drawn over
    rank, size = launched_place()
    error = _terminated or error  # what was interrupted may have failed in some other way
    if isinstance(error, KeyboardInterrupt):
        error = TerminatedError(signal.SIGINT)
    status = 1
    if isinstance(error, SuspendedError):
        leave(SUSPENDED_STATUS)
    elif isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if status == 0:
            leave(0)
        if isinstance(error.code, str):
            console.say(error.code)
    elif isinstance(error, RefusedError):
        leave(0)  # the status is that of the rank which says why
    elif isinstance(error, ExcludedError):
        console.say(f"aladdin_mpi: {error}")
        leave(0)
    elif isinstance(error, TerminatedError):
        status = 128 + error.signum
        if rank == 0:
            console.say(f"aladdin_mpi: stopped by {error}{_and_then()}")
    elif isinstance(error, UserError):
        status = 2
        if isinstance(error, ClosedError):
            time.sleep(YIELD_SECONDS)  # the rank that closed the run has the word
        elif not error.agreed:
            _await_turn(rank, size)
        where = f" (rank {rank})" if size > 1 and not error.agreed else ""
        console.say(f"aladdin_mpi: error{where}: {error}")
        if error.agreed:
            leave(status)
    elif isinstance(error, LostError):
        console.say(f"aladdin_mpi: error: {error}{_and_then(AGAIN)}")
    elif _peer(error) is not None:
        # Rank 0 has the word; of its own death the next one tells. In virtual time one process is
        # all ranks.
        if size > 1 and rank != (1 if _peer(error) == 0 else 0):
            time.sleep(YIELD_SECONDS)  # who is still there then has died as well
        console.say(f"aladdin_mpi: error: {error}{_and_then(AGAIN)}")
    elif (full := system_error(error)) and full.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" (rank {rank})" if size > 1 else ""
        console.say(
            f"aladdin_mpi: error{where}: {full}; make room there, then go on from the last "
            "checkpoint with --resume"
        )
    else:
        _await_turn(rank, size)
        _print_traceback(error, rank, size)
    _abort(status, size)


def _await_turn(rank: int, size: int) -> None:
    """Let the ranks before this one go first.

    All workers run one loop, and a mistake in it is made by all. The first to tell of it ends the
    job, and with it those who wait here.
    """
    turn = min(rank - 1, LAST_TURN)
    if size == 1 or turn <= 0 or threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(turn * TURN_SECONDS)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _and_then(otherwise: str = "") -> str:
    text = remedy() or otherwise
    return f"; {text}" if text else ""


def _peer(error: BaseException) -> int | None:
    """The rank whose death is the error."""
    return error.rank if isinstance(error, PeerFailedError) else None


def _print_traceback(error: BaseException, rank: int, size: int) -> None:
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    mark = f"[rank {rank}] " if size > 1 else ""
    console.say("".join(mark + line for line in lines.splitlines(keepends=True)))


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

            # Open MPI forgets the status of an abort when all others have died.
            if not (_leaves_by_itself() and MPI.COMM_WORLD.Get_failed().size == size - 1):
                MPI.COMM_WORLD.Abort(status)
        except ImportError:
            pass  # the launcher ends the job when a process exits with an error
    os._exit(status)


def _leaves_by_itself() -> bool:
    """Whether ranks end without MPI_Finalize, see :mod:`aladdin_mpi.transport.mpi.library`."""
    mpi4py = sys.modules.get("mpi4py")
    return mpi4py is not None and mpi4py.rc.finalize is False


def before_leaving(action: Callable[[], None]) -> None:
    """Let ``action`` be the last that this process does, if it ends by itself."""
    atexit.register(action)
    _last.append(action)  # for :func:`leave`, which does without atexit


def leave(status: int) -> None:
    """Exit when every rank does so by itself; does not return."""
    sys.stdout.flush()
    sys.stderr.flush()
    if threading.current_thread() is threading.main_thread():
        # Open MPI ends the others as soon as the first has left with an error.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for action in _last:
        action()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and not mpi.Is_finalized() and not _leaves_by_itself():
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
