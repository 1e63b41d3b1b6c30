"""Training from a notebook or a prompt: mpirun calls a function on several ranks.

The ranks run ``python -m aladdin_mpi.launching FOLDER``, and find the function in the folder.
"""

from __future__ import annotations

import codecs
import io
import json
import os
import pickle
import selectors
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

from aladdin_mpi.errors import (
    SUSPENDED_STATUS,
    ClosedError,
    LaunchError,
    PeerFailedError,
    RefusedError,
    ServedError,
    UserError,
)
from aladdin_mpi.process import guard
from aladdin_mpi.process.files import write_whole
from aladdin_mpi.process.launcher import (
    LAUNCHED_WORKERS,
    end,
    end_with_parent,
    environment,
    launcher,
)

T = TypeVar("T")
CALL, RESULT, ERROR = "call.pickle", "result.pickle", "error-{rank}.json"
"""Files of a launch in its folder."""
POLL_SECONDS = 0.5
CONSEQUENCES = (ClosedError, PeerFailedError, RefusedError, guard.TerminatedError)
"""Errors of ranks that end because another rank has failed."""


def launch(
    function: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    workers: int = 4,
    servers: int = 1,
    timeout: float | None = None,
    mpirun: str = "mpirun --oversubscribe -np {ranks}",
) -> T:
    """Call ``function(*args, **kwargs)`` on the ranks of an MPI job, as a script under mpirun.

    The function makes a :class:`DataParallel` and trains. The output of the ranks appears here. The
    job ends with this call, also if it is interrupted by Ctrl-C or in a notebook.

    Args:
        function: defined at the top of a module, which all ranks import.
        args: positional arguments, which are pickled.
        kwargs: keyword arguments, which are pickled.
        workers: number of workers.
        servers: number of servers: that of ``DataParallel``, 1 by default; 0 for an algorithm
            without servers, such as ar-sgd.
        timeout: longest duration in seconds; None: no limit.
        mpirun: the command that starts the ranks. Those on other hosts need the same temporary
            folder (``TMPDIR``).

    Returns:
        The first worker's result, which is pickled. (Servers do not run the training loop.)

    Raises:
        UserError: the function or its arguments cannot be sent, or a rank raised this error.
        LaunchError: a rank failed; the message contains its traceback.
        TimeoutError: the job was ended after ``timeout``.
    """
    if guard.launched_place()[1] > 1:
        raise UserError(
            "launch() was called on a rank of an MPI job. Start the program without mpirun, or "
            "call the function itself."
        )
    if workers < 1 or servers < 0:
        raise UserError(
            f"launch: expected workers of at least 1 and servers of at least 0, got {workers} and "
            f"{servers}; pass servers=0 for an algorithm without servers"
        )
    path = os.pathsep.join(filter(None, sys.path))
    command = launcher(mpirun, workers + servers, "launch: mpirun")
    with tempfile.TemporaryDirectory(prefix="aladdin_mpi-launch-") as name:
        folder = Path(name)
        call = (function, tuple(args), dict(kwargs or {}))
        (folder / CALL).write_bytes(_pickled(call))
        job = subprocess.Popen(
            [*command, sys.executable, "-m", __name__, name, str(servers)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**environment(), "PYTHONPATH": path, LAUNCHED_WORKERS: str(workers)},
            start_new_session=True,  # Ctrl-C reaches only this process, which ends the job
            preexec_fn=end_with_parent,
        )
        try:
            last = _relay(job, timeout)
        finally:
            end(job)
        return _result(folder, job.returncode, last)


class _Pickler(pickle.Pickler):
    """Refuses what a rank cannot import."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, FunctionType)) and value.__module__ == "__main__":
            raise UserError(
                f"launch: {value.__qualname__} is defined in the notebook or main program, which "
                "the ranks cannot import. Put it into a file, such as training.py (in a notebook "
                "by %%writefile training.py), and import it from there."
            )
        return NotImplemented


def _pickled(call: Any) -> bytes:
    memory = io.BytesIO()
    try:
        _Pickler(memory).dump(call)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"launch: the function or its arguments cannot be pickled ({error}). Pass a function "
            "at the top of a module, and arguments such as numbers, texts and tensors; make other "
            "objects inside the function."
        ) from error
    return memory.getvalue()


def _relay(job: subprocess.Popen[bytes], timeout: float | None) -> str:
    """Print the job's output until it ends; return the last of its errors.

    Raises:
        TimeoutError: the time has passed.
    """
    until = None if timeout is None else time.monotonic() + timeout
    assert job.stdout is not None and job.stderr is not None
    last = ""
    with job.stdout, job.stderr, selectors.DefaultSelector() as selector:
        for pipe, stream in ((job.stdout, sys.stdout), (job.stderr, sys.stderr)):
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            selector.register(pipe, selectors.EVENT_READ, (stream, decoder))
        while selector.get_map():
            ready = selector.select(POLL_SECONDS)
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fileobj)
                stream, decoder = key.data
                text = decoder.decode(data, final=not data)
                stream.write(text)
                stream.flush()
                if stream is sys.stderr:
                    last = (last + text)[-2000:]
            if not ready and job.poll() is not None:
                break  # a process that outlives the job has its output open
            if until is not None and time.monotonic() > until:
                raise TimeoutError(f"launch: the job did not end within {timeout:g} s")
    job.wait()
    return last


def _result(folder: Path, status: int, last: str) -> Any:
    """Return the first worker's result, or raise the error of the rank that failed first."""
    reports = sorted(folder.glob(ERROR.format(rank="*")), key=lambda path: path.stat().st_mtime_ns)
    errors = [json.loads(path.read_text()) for path in reports]
    errors.sort(key=lambda error: error["is_consequence"])
    if errors:
        first = errors[0]
        raise (UserError if first["is_user_error"] else LaunchError)(first["text"])
    if status == SUSPENDED_STATUS:
        raise LaunchError(
            "a signal has ended the run, which is saved; launch it again with resume='auto'"
        )
    if status or not (folder / RESULT).exists():
        raise LaunchError(f"the job ended with status {status} and no result: {last.strip()}")
    return pickle.loads((folder / RESULT).read_bytes())


# -- on a rank ---------------------------------------------------------------------------------
def _call(folder: Path, first_worker: int) -> int:
    """Call the function on this rank, and write the result or the error into the folder."""
    rank, _ = guard.launched_place()
    try:
        function, args, kwargs = pickle.loads((folder / CALL).read_bytes())
        result = function(*args, **kwargs)
        if rank == first_worker:
            write_whole(folder / RESULT, pickle.dumps(result))
    except BaseException as error:
        is_exit = isinstance(error, SystemExit) and error.code in (0, None, SUSPENDED_STATUS)
        if not (is_exit or isinstance(error, ServedError)):
            _report(folder, rank, error)
            if not _uses_mpi():
                # Starting MPI to end the job would wait for the other ranks.
                sys.stdout.flush()
                os._exit(1)
        raise
    return 0


def _uses_mpi() -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_initialized())


def _report(folder: Path, rank: int, error: BaseException) -> None:
    is_user_error = isinstance(error, UserError)
    trace = "".join(traceback.format_exception(error))
    report = {
        "text": str(error) if is_user_error else f"rank {rank}: {error!r}\n\n{trace}",
        "is_user_error": is_user_error,
        "is_consequence": isinstance(error, CONSEQUENCES),
    }
    write_whole(folder / ERROR.format(rank=rank), json.dumps(report).encode())


if __name__ == "__main__":
    sys.exit(guard.run_guarded(lambda: _call(Path(sys.argv[1]), int(sys.argv[2]))))
