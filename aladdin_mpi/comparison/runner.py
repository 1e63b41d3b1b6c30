"""The runs as child processes: start, end and causes of failure."""

from __future__ import annotations

import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from aladdin_mpi.comparison.figures import read_figures
from aladdin_mpi.comparison.plan import OPTIONS, Run
from aladdin_mpi.errors import UserError
from aladdin_mpi.process import console
from aladdin_mpi.process.console import say
from aladdin_mpi.process.files import open_own
from aladdin_mpi.process.guard import TerminatedError
from aladdin_mpi.process.launcher import END_SECONDS, end_with_parent, environment, launcher

POLL_SECONDS = 0.1
PROBE_SECONDS = 30.0
LAST_BYTES = 20_000
"""Bytes at the end of a log that are searched for the cause of a failure."""
_HAS_CAUSE = re.compile(r"aladdin_mpi: error|^(\[rank \d+\] )?[A-Za-z_][\w.]*(Error|Exception)\b")
_HAS_NO_CAUSE = re.compile(r"[\s\-=*]*|.*raised by rank \d+")


class Child:
    """A run's process, whose output is appended to ``log``, and which inherits ``lock``."""

    def __init__(self, command: Sequence[str], log: Path, lock: int) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(open_own(log, os.O_WRONLY | os.O_APPEND), "ab") as file:
            file.write(f"# {console.command_line(command)}\n".encode())
            file.flush()
            self._start_of_log = file.tell()
            self._log = log
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment(),
                start_new_session=True,  # Ctrl-C reaches only the comparison
                pass_fds=(lock,),
                preexec_fn=end_with_parent,
            )

    def status(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        return self._process.poll()

    def error(self) -> str:
        """Return the last line of the log with a cause of failure."""
        with self._log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._start_of_log, size - LAST_BYTES))
            return last_error(file.read().decode(errors="replace"))

    def ask_to_end(self) -> None:
        """Send SIGTERM, which mpirun forwards to its ranks."""
        if self._process.poll() is None:
            self._process.terminate()

    def end(self) -> None:
        """Wait for the process, and kill it if it does not end in time."""
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def last_error(text: str) -> str:
    """Return the line of a program's output that best describes its failure."""
    lines = [line.rstrip() for line in reversed(text.splitlines())]
    reasons = [line for line in lines if _HAS_CAUSE.search(line)]
    return next(iter(reasons or [x for x in lines if not _HAS_NO_CAUSE.fullmatch(x)]), "")


def check_launcher(template: str, ranks: int) -> None:
    """Check that the launcher can start this number of ranks, which do nothing.

    Raises:
        UserError: it cannot.
    """
    command = [*launcher(template, ranks), sys.executable, "-c", "pass"]
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
            timeout=PROBE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return  # Open MPI 5 occasionally misses the end of very short programs
    if ended.returncode:
        raise UserError(
            f"--mpirun: cannot start {ranks} ranks here: {shlex.join(command)} ended with status "
            f"{ended.returncode}, saying:\n{ended.stdout.strip()}\nUse fewer --workers or another "
            "--mpirun; for more ranks than cores on one machine for example "
            "--mpirun 'mpirun --oversubscribe -np {ranks}'"
        )


@dataclass(frozen=True)
class Failure:
    """A failed run."""

    run: Run
    status: int
    error: str

    def __str__(self) -> str:
        reason = f": {self.error}" if self.error else ""
        return f"{self.run.title}: failed with status {self.status}{reason}; see {self.run.log}"


class Runner:
    """Scheduler of the runs.

    Args:
        command: returns the command of a run, which depends on the state of its folder.
        jobs: number of simultaneous runs.
        lock: a descriptor that the children inherit.
    """

    def __init__(self, command: Callable[[Run], list[str]], jobs: int, lock: int) -> None:
        self._command = command
        self._jobs = jobs
        self._lock = lock
        self._stopped = 0
        self._running: dict[Run, tuple[Child, float]] = {}
        self._took: list[tuple[str, float]] = []
        self._waiting: list[Run] = []
        self._place: dict[Run, str] = {}
        self.failures: list[Failure] = []

    def run(self, runs: Sequence[Run]) -> None:
        """Complete all runs, and collect failed ones in ``failures``.

        Raises:
            TerminatedError: SIGTERM or SIGINT was received; all children have ended.
        """
        width = len(str(len(runs)))
        places = enumerate(runs, start=1)
        self._place = {run: f"[{place:{width}}/{len(runs)}] " for place, run in places}
        self._waiting = [run for run in runs if not run.finished]
        with self._signals(), self._children():
            while (self._waiting or self._running) and not self._stopped:
                while self._waiting and len(self._running) < self._jobs:
                    self._start(self._waiting.pop(0))
                time.sleep(POLL_SECONDS)
                self._collect()
        if self._stopped:
            raise TerminatedError(self._stopped)

    def _start(self, run: Run) -> None:
        command = self._command(run)
        how = "resumes from its checkpoint" if run.resumes else "started"
        if not (run.folder / OPTIONS).exists():
            run.write_options()
        self._running[run] = (Child(command, run.log, self._lock), time.monotonic())
        say(f"{self._place[run]}{run.title}: {how}")

    def _collect(self) -> None:
        for run, (child, start) in list(self._running.items()):
            status = child.status()
            if status is None:
                continue
            del self._running[run]
            if status or not run.finished:
                self.failures.append(Failure(run, status, child.error()))
                say(f"{self._place[run]}{self.failures[-1]}")
                continue
            took, label = time.monotonic() - start, run.entry.label
            self._took.append((label, took))
            result = f"{read_figures(run.folder, label)}; took {console.duration(took)}"
            say(f"{self._place[run]}{run.title}: {result}{self._remaining()}")

    def _remaining(self) -> str:
        """Return an estimate from finished runs, of the same algorithm if possible."""
        if not (self._waiting or self._running):
            return ""
        now = time.monotonic()
        seconds = sum(self._expected(run) for run in self._waiting)
        for run, (_, start) in self._running.items():
            seconds += max(self._expected(run) - (now - start), 0.0)
        return f"; about {console.duration(seconds / self._jobs)} left"

    def _expected(self, run: Run) -> float:
        same = [took for label, took in self._took if label == run.entry.label]
        return statistics.mean(same or [took for _, took in self._took])

    @contextmanager
    def _children(self) -> Iterator[None]:
        try:
            yield
        finally:
            for child, _ in self._running.values():
                child.ask_to_end()
            for child, _ in self._running.values():
                child.end()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Record SIGTERM and SIGINT; a second one ends the process as usual."""
        before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}

        def restore() -> None:
            for each, handler in before.items():
                signal.signal(each, handler)

        def note(signum: int, frame: FrameType | None) -> None:
            self._stopped = signum
            restore()

        for each in before:
            signal.signal(each, note)
        try:
            yield
        finally:
            restore()
