"""Errors and signals of a process, handled so that no rank waits for one that has ended."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import FrameType, TracebackType
from typing import TypeVar

from aladdin_mpi.errors import (
    DISK_FULL,
    SUSPENDED_STATUS,
    ClosedError,
    CutOffError,
    ExcludedError,
    LostError,
    PeerFailedError,
    RefusedError,
    ServedError,
    SuspendedError,
    UserError,
    system_error,
)
from aladdin_mpi.process import console

T = TypeVar("T")

FLUSH_SECONDS = 0.3
"""Time for the launcher to forward output before the job is ended."""
YIELD_SECONDS = 3.0
"""Time for another rank to report the error."""
TURN_SECONDS = 1.0
"""Time for a rank to report its error and end the job before the next one does."""
AGAIN = "start the job again"
"""The remedy if a rank is lost before the run has begun."""
LAST_TURN = 3
"""Ranks from this one on do not wait for each other."""

remedy: Callable[[], str] = str
"""Returns how to continue after the job has ended during training."""
excuse: Callable[[], str] = str
"""Returns why this rank leaves a run that continues, after another rank's failure; empty: none."""
_last: list[Callable[[], None]] = []
_before_ending: list[Callable[[], None]] = []
_LIBRARY = Path(os.__file__).parent
_ending = threading.Lock()


class TerminatedError(BaseException):
    """SIGTERM or SIGINT was received; clean up and leave."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def run_guarded(main: Callable[[], T]) -> T:
    """Run a command's ``main`` and return its result; report an error and end the job.

    Imports belong inside ``main``, so that an error in them is caught as well.
    """
    install()
    try:
        check_current_folder()
        return main()
    except BaseException as error:
        end_job(error)
        raise AssertionError("unreachable") from error


_terminated: TerminatedError | None = None


def install() -> None:
    """Install handlers by which every uncaught error of this process ends the whole job."""
    if _is_interactive():
        return
    global _own_hook
    if sys.excepthook is not _end_by_hook:
        _own_hook = None if sys.excepthook is sys.__excepthook__ else sys.excepthook
        sys.excepthook = _end_by_hook
    threading.excepthook = _end_in_thread
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
        # A script with one process may catch KeyboardInterrupt to end its training early.
        if launched_place()[1] > 1:
            signal.signal(signal.SIGINT, _terminate)


_own_hook: Callable[[type[BaseException], BaseException, TracebackType | None], object] | None = (
    None
)
"""The program's ``sys.excepthook``, such as a debugger's."""


def _end_by_hook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """End the job after an uncaught error; without other ranks, the program's hook reports it."""
    if _own_hook is None or launched_place()[1] > 1:
        end_job(error)
    else:
        _own_hook(kind, error, trace)
        _abort(1, 1)


# Batch systems send them before a time limit; see hooks/suspension.py.
SUSPEND_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
_received: list[signal.Signals] = []


def note_suspend_signals() -> None:
    """Record :data:`SUSPEND_SIGNALS` from now on, unless the program has its own handler."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in SUSPEND_SIGNALS:
        # Reinstall it, as some MPIs replace the handler when they start.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN, None, _note):
            signal.signal(number, _note)
    atexit.unregister(_ignore_suspend_signals)
    atexit.register(_ignore_suspend_signals)


def suspend_signal() -> signal.Signals | None:
    """Return the first suspend signal that this process has received, or None."""
    return _received[0] if _received else None


def _note(number: int, frame: FrameType | None) -> None:
    _received.append(signal.Signals(number))


def _ignore_suspend_signals() -> None:
    """Ignore the signals at exit: Python would restore the default, which kills the process."""
    for number in SUSPEND_SIGNALS:
        if signal.getsignal(number) is _note:
            signal.signal(number, signal.SIG_IGN)


def check_current_folder() -> None:
    """Raise UserError if the current folder does not exist; MPI and torch would crash."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError(
            "the current folder has been deleted. Change to an existing one (cd), and start again."
        ) from None


def refuse_launcher(remedy: str, uses_mpirun: bool = False) -> None:
    """Refuse several processes of a command that is one process.

    A command that ``uses_mpirun`` itself cannot be started by it even as one process.

    Raises:
        UserError: there is one, at rank 0.
        RefusedError: there is one, at the other ranks.
    """
    rank, size = launched_place()
    is_nested = uses_mpirun and any(name in os.environ for name, _ in _PLACES[:2])
    if size > 1 or is_nested:
        text = f"this command was started by mpirun or srun. Leave that out, because {remedy}"
        raise UserError(text, agreed=True) if rank == 0 else RefusedError


def _is_interactive() -> bool:
    """Return whether this is a notebook or a prompt, which errors and Ctrl-C do not end."""
    return launched_place()[1] == 1 and (hasattr(sys, "ps1") or bool(sys.flags.interactive))


def _end_in_thread(args: threading.ExceptHookArgs) -> None:
    # The next caller of TensorBoard's writer gets the error of its thread.
    is_raised_again = type(args.thread).__module__.startswith("tensorboard.")
    # sys.exit() in a user's thread ends only that thread, as in any program; see also no_exit.
    if not (is_raised_again or isinstance(args.exc_value, SystemExit)):
        end_job(args.exc_value or SystemExit(1))


@contextmanager
def no_exit() -> Iterator[None]:
    """Turn a call of ``sys.exit`` in the user's code into a UserError with its location.

    A rank that exits during a run would leave the others waiting, without an error message.
    """
    try:
        yield
    except SuspendedError:
        raise
    except SystemExit as error:
        raise exit_called(error) from error


def exit_called(error: SystemExit) -> UserError:
    """Return the error for a call of ``sys.exit`` during a run."""
    given = "" if error.code is None else repr(error.code)
    frames = traceback.extract_tb(error.__traceback__)
    # The innermost line outside the standard library (argparse, for example).
    last = ([each for each in frames if Path(each.filename).parent != _LIBRARY] or frames)[-1]
    return UserError(
        f"{last.filename}, line {last.lineno}, in {last.name}: sys.exit({given}) was called "
        "during the run, which would leave other ranks waiting. Raise an error instead."
    )


def _terminate(signum: int, frame: FrameType | None) -> None:
    # A second signal ends the process at once, even during cleanup.
    signal.signal(signum, signal.SIG_DFL)
    global _terminated
    _terminated = TerminatedError(signum)
    raise _terminated


def warn(texts: Iterable[str]) -> None:
    """Print warnings, on the rank that calls it."""
    for text in texts:
        console.say(f"aladdin_mpi: warning: {text}")


def end_job(error: BaseException) -> None:
    """Report ``error`` and end the job on every rank; never return."""
    if not _ending.acquire(blocking=False):  # the lock is never released
        time.sleep(2 * YIELD_SECONDS)  # the first caller ends the process
        os._exit(1)
    if threading.current_thread() is threading.main_thread():
        # Another rank may end the job, and with it this one, before it has reported.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    console.close()  # the display must not overwrite the report
    rank, size = launched_place()
    error = _terminated or error  # the interrupted code may have raised another error
    if isinstance(error, KeyboardInterrupt):
        error = TerminatedError(signal.SIGINT)
    status, where = 1, f" (rank {rank})" if size > 1 else ""
    if isinstance(error, SuspendedError):
        leave(SUSPENDED_STATUS)
    elif isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if status == 0:
            leave(0)
        if isinstance(error.code, str):
            console.say(error.code)
    elif isinstance(error, (RefusedError, ServedError)):
        leave(0)  # another rank reports the reason and determines the status, or all is done
    elif isinstance(error, ExcludedError):
        console.say(f"aladdin_mpi: {error}")
        if isinstance(error, CutOffError):
            _run(_before_ending)
        leave(0)
    elif isinstance(error, TerminatedError):
        status = 128 + error.signum
        if rank == 0:
            console.say(f"aladdin_mpi: stopped by {error}{_and_then()}")
    elif isinstance(error, UserError):
        status = 2
        if isinstance(error, ClosedError):
            time.sleep(YIELD_SECONDS)  # the rank that closed the run reports
        elif not error.agreed:
            _await_turn(rank, size)
        console.say(f"aladdin_mpi: error{'' if error.agreed else where}: {error}")
        if error.agreed:
            leave(status)
    elif isinstance(error, (LostError, PeerFailedError)):
        # Rank 0 reports, or rank 1 if rank 0 has failed. A simulation has one process.
        failed = error.rank if isinstance(error, PeerFailedError) else None
        if failed is not None and size > 1 and rank != (1 if failed == 0 else 0):
            time.sleep(YIELD_SECONDS)
        if reason := excuse():
            console.say(f"aladdin_mpi: {reason}")
            leave(0)
        console.say(f"aladdin_mpi: error: {error}{_and_then(AGAIN)}")
    elif (full := system_error(error)) and full.errno in DISK_FULL:
        console.say(
            f"aladdin_mpi: error{where}: {full}. Free space there"
            f"{_and_then('continue from the last checkpoint with --resume')}"
        )
    else:
        _await_turn(rank, size)
        if excuse is not str:  # FSDP may have noticed the failure of an island's member first
            time.sleep(YIELD_SECONDS)
        if reason := excuse():
            console.say(f"aladdin_mpi: {reason}")
            leave(0)
        lines = "".join(traceback.format_exception(error)).splitlines(keepends=True)
        mark = f"[rank {rank}] " if size > 1 else ""
        console.say("".join(mark + line for line in lines))
    _abort(status, size)


def _await_turn(rank: int, size: int) -> None:
    """Wait until the ranks before this one have had time to report.

    All ranks run the same script with the same error. The first one to report it ends the job,
    including the ranks that wait here.
    """
    turn = min(rank, LAST_TURN)
    if size == 1 or not turn or threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(turn * TURN_SECONDS)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _and_then(otherwise: str = "") -> str:
    text = remedy() or otherwise
    return f"; {text}" if text else ""


_PLACES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # the latter is missing in batch scripts
)
"""Variables for rank and size in the environment of a launched process."""


def launched_place() -> tuple[int, int]:
    """Return rank and size, from the launcher if MPI has not started; (0, 1) without a launcher."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        return mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
    for rank, size in _PLACES:
        if rank in os.environ:
            return int(os.environ[rank]), int(os.environ.get(size, "1"))
    return 0, 1


def _abort(status: int, size: int) -> None:
    console.flush()
    if size > 1:
        time.sleep(FLUSH_SECONDS)
        try:
            from mpi4py import MPI

            _run(_before_ending)
            # Open MPI loses the status of an abort if all other ranks have failed.
            if not (_leaves_by_itself() and MPI.COMM_WORLD.Get_failed().size == size - 1):
                MPI.COMM_WORLD.Abort(status)
        except ImportError:
            pass  # the launcher ends the job when a process exits with an error
    os._exit(status)


def _leaves_by_itself() -> bool:
    """Return whether ranks end without MPI_Finalize; see :mod:`.transport.mpi.library`."""
    mpi4py = sys.modules.get("mpi4py")
    return mpi4py is not None and mpi4py.rc.finalize is False


def before_leaving(action: Callable[[], None]) -> None:
    """Run ``action`` at the end of this process, unless it is killed."""
    atexit.register(action)
    _last.append(action)  # for :func:`leave`, which bypasses atexit


def before_ending(action: Callable[[], None]) -> None:
    """Run ``action`` before this process aborts the job, or leaves it as its link is cut."""
    _before_ending.append(action)


def _run(actions: Iterable[Callable[[], None]]) -> None:
    for action in actions:
        action()


def leave(status: int) -> None:
    """Exit this process when every rank exits by itself; never return."""
    console.flush()
    if threading.current_thread() is threading.main_thread():
        # Open MPI ends the others as soon as the first rank exits with an error.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _run(_last)
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and not mpi.Is_finalized() and not _leaves_by_itself():
        mpi.Finalize()
    os._exit(status)


@contextmanager
def quiet_unless_first(rank: int) -> Iterator[None]:
    """Discard stdout on all ranks but rank 0."""
    if rank == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield
