"""Runs the runs: some side by side, none started twice, all ended with the comparison."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from aladdin_mpi.comparison.children import Child
from aladdin_mpi.comparison.figures import read_figures
from aladdin_mpi.comparison.plan import Run
from aladdin_mpi.process import units
from aladdin_mpi.process.console import say
from aladdin_mpi.process.guard import TerminatedError

POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Failure:
    """A run that has not come to its end."""

    run: Run
    status: int
    error: str

    def __str__(self) -> str:
        reason = f": {self.error}" if self.error else ""
        return f"{self.run.title}: failed with status {self.status}{reason}; see {self.run.log}"


class Runner:
    """Starts runs and follows them to their ends.

    Args:
        command: the command of a run, for the state its folder is in.
        jobs: how many at once.
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
        """Bring all runs to their end; those that failed are in ``failures`` then.

        Raises:
            TerminatedError: SIGTERM or SIGINT has come; all children have ended.
        """
        width = len(str(len(runs)))
        self._place = {
            run: f"[{number:{width}}/{len(runs)}] {run.title}"
            for number, run in enumerate(runs, start=1)
        }
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
        how = "goes on from its checkpoint" if "--resume" in command else "started"
        self._running[run] = (Child(command, run.log, self._lock), time.monotonic())
        say(f"{self._place[run]}: {how}")

    def _collect(self) -> None:
        for run, (child, start) in list(self._running.items()):
            status = child.status()
            if status is None:
                continue
            del self._running[run]
            took = time.monotonic() - start
            if status == 0 and run.finished:
                self._took.append((run.entry.label, took))
                figures = read_figures(run.folder, run.entry.label)
                say(f"{self._place[run]}: {figures}; took {units.duration(took)}{self._left()}")
                continue
            failure = Failure(run, status, child.error())
            self.failures.append(failure)
            number = self._place[run].partition("]")[0]
            say(f"{number}] {failure}")

    def _left(self) -> str:
        """An estimate from the runs that have ended: those of the same algorithm, if any."""
        if not (self._waiting or self._running):
            return ""
        now = time.monotonic()
        left = sum(self._expected(run) for run in self._waiting)
        for run, (_, start) in self._running.items():
            left += max(self._expected(run) - (now - start), 0.0)
        return f"; about {units.duration(left / self._jobs)} left"

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
        """Note SIGTERM and SIGINT; a second one ends the process as usual."""

        def note(signum: int, frame: FrameType | None) -> None:
            self._stopped = signum
            for each, handler in before.items():
                signal.signal(each, handler)

        before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
        for each in before:
            signal.signal(each, note)
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
