"""The whole of a comparison, from its command line to its report."""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from aladdin_mpi.comparison import baseline as baselines
from aladdin_mpi.comparison import children, figures, folder, plots, report
from aladdin_mpi.comparison.children import Child
from aladdin_mpi.comparison.figures import read_figures
from aladdin_mpi.comparison.folder import machine
from aladdin_mpi.comparison.options import ComparisonRequest
from aladdin_mpi.comparison.plan import Run, plan, read_runs, unequal
from aladdin_mpi.comparison.report import Findings
from aladdin_mpi.errors import UserError
from aladdin_mpi.process import console
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
                say(f"{self._place[run]}: {figures}; took {console.duration(took)}{self._left()}")
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
        return f"; about {console.duration(left / self._jobs)} left"

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


_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")


def compare(request: ComparisonRequest) -> int:
    """Run or read what a command line asks for; returns the exit status.

    Raises:
        UserError: it cannot be done as asked.
        TerminatedError: it was stopped by a signal; nothing of it is left running.
    """
    if any(name in os.environ for name in _RANK_VARIABLES):
        raise UserError(
            "expected to be started once, got started by mpirun; leave mpirun out: the "
            "comparison starts the ranks of its runs itself (--engine mpi, --mpirun)"
        )
    return _read(request) if request.options.read else _run(request)


# -- finished runs ------------------------------------------------------------------------
def _read(request: ComparisonRequest) -> int:
    options = request.options
    finished = read_runs(options.read)
    if options.out is not None:
        folder.check_out(options.out, options)
    figures = [run.figures for run in finished]
    alone = (
        baselines.of_runs([run.options for run in finished], figures)
        if options.baseline is None
        else baselines.given(options.baseline)
    )
    sizes = [(run.figures.label, run.options, run.figures.value("workers")) for run in finished]
    engines = {str(run.summary.get("engine")) for run in figures}
    findings = Findings(
        command=folder.command_line(request),
        engine=engines.pop() if len(engines) == 1 else "several",
        runs=figures,
        target=options.target_accuracy,
        baseline=alone,
        ideals=baselines.ideals(sizes, alone),
        notes=unequal(figures),
    )
    if options.out is not None:
        with folder.claimed(options.out, request):
            report.write(findings, options.out, machine())
    _show(findings, options.out)
    return 0


# -- new runs -----------------------------------------------------------------------------
def _run(request: ComparisonRequest) -> int:
    options = request.options
    out = options.out or _default_out(request)
    folder.check_out(out, options)
    runs = plan(request, out)
    alone = _baseline(request, runs, out)
    every = [alone, *runs] if isinstance(alone, Run) else runs
    if options.engine == "mpi" and not all(run.finished for run in every):
        children.check_launcher(options.mpirun, max(run.ranks for run in every))
    with folder.claimed(out, request) as lock:
        if isinstance(alone, Run):
            baselines.write_options(alone)
        runner = Runner(lambda run: _command(request, run), options.jobs, lock)
        _announce(every, out)
        runner.run(every)
        return _report(request, runs, alone, runner.failures, out)


def _default_out(request: ComparisonRequest) -> Path:
    """``comparisons/ENGINE-MODEL-DATASET``, so that the same command finds its runs again."""
    options = plan(request, Path("comparisons"))[0].options
    name = f"{request.options.engine}-{options.model}-{options.dataset}"
    return Path("comparisons") / name.replace("/", "_").replace(":", "_")


def _baseline(
    request: ComparisonRequest, runs: Sequence[Run], out: Path
) -> baselines.Baseline | Run:
    """One worker's throughput, or the run that measures it."""
    options = request.options
    if options.baseline is not None:
        return baselines.given(options.baseline)
    # Of the options that all have in common, if there is an algorithm without others.
    plain = next((run for run in runs if not run.entry.words), runs[0])
    return baselines.from_options(plain.options) or baselines.measuring_run(request, out)


def _command(request: ComparisonRequest, run: Run) -> list[str]:
    start = [sys.executable, "-m", request.options.run_module, *run.start_words()]
    if request.options.engine == "virtual":
        return start
    return [*children.launcher(request.options.mpirun, run.ranks), *start]


def _announce(runs: Sequence[Run], out: Path) -> None:
    done = sum(run.finished for run in runs)
    ended = f", {done} of them finished before" if done else ""
    print(f"{len(runs)} runs in {out}{ended}", file=sys.stderr, flush=True)


def _report(
    request: ComparisonRequest,
    runs: Sequence[Run],
    alone: baselines.Baseline | Run,
    failures: Sequence[Failure],
    out: Path,
) -> int:
    options = request.options
    ended = [run for run in runs if run.finished]
    figures = [read_figures(run.folder, run.entry.label) for run in ended]
    if isinstance(alone, Run):
        known = baselines.measured(alone) if alone.finished else None
    else:
        known = alone
    told = [str(failure) for failure in failures]
    if figures:
        sizes = [(run.entry.label, run.options, options.workers) for run in ended]
        findings = Findings(
            command=folder.command_line(request),
            engine=options.engine,
            runs=figures,
            target=options.target_accuracy,
            baseline=known,
            shared=request.shared,
            ideals=baselines.ideals(sizes, known),
            variants={run.entry.label: run.entry.words for run in runs if run.entry.words},
            failures=told,
            notes=unequal(figures),
        )
        report.write(findings, out, machine())
        _show(findings, out)
    for line in told:
        print(line, file=sys.stderr)
    if failures:
        print(
            f"{len(told)} of {len(runs)} runs failed; the same command tries them again",
            file=sys.stderr,
        )
    return 1 if failures else 0


def _show(findings: Findings, out: Path | None) -> None:
    cells = figures.cells(findings.rows, findings.target, "+-")
    print(f"{findings.title}\n\n{figures.plain(cells)}\n")
    for note in findings.notes:
        print(note)
    if findings.baseline is not None:
        alone = findings.baseline
        print(f"one worker alone: {alone.samples_per_second:,.6g} samples/s, {alone.source}")
    if out is not None:
        print("\n".join([*plots.not_drawn(), f"report in {out / report.REPORT}"]))
    sys.stdout.flush()
