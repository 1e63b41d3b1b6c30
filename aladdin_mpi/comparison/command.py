"""The whole of a comparison, from its command line to its report."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from aladdin_mpi.comparison import baseline as baselines
from aladdin_mpi.comparison import children, folder, plots, reading, report, table
from aladdin_mpi.comparison.figures import read_figures
from aladdin_mpi.comparison.machine import machine
from aladdin_mpi.comparison.options import Request
from aladdin_mpi.comparison.plan import Run, plan
from aladdin_mpi.comparison.report import Findings
from aladdin_mpi.comparison.runner import Failure, Runner
from aladdin_mpi.errors import UserError

_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")


def compare(request: Request) -> int:
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
def _read(request: Request) -> int:
    options = request.options
    found = reading.read_runs(options.read)
    if options.out is not None:
        folder.check_out(options.out, options)
    figures = [run.figures for run in found]
    alone = (
        baselines.of_runs([run.options for run in found], figures)
        if options.baseline is None
        else baselines.given(options.baseline)
    )
    sizes = [(run.figures.label, run.options, run.figures.value("workers")) for run in found]
    engines = {str(run.summary.get("engine")) for run in figures}
    findings = Findings(
        command=folder.command_line(request),
        engine=engines.pop() if len(engines) == 1 else "several",
        runs=figures,
        target=options.target_accuracy,
        baseline=alone,
        ideals=baselines.ideals(sizes, alone),
        notes=reading.unequal(figures),
    )
    if options.out is not None:
        with folder.claimed(options.out, request):
            report.write(findings, options.out, machine())
    _show(findings, options.out)
    return 0


# -- new runs -----------------------------------------------------------------------------
def _run(request: Request) -> int:
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


def _default_out(request: Request) -> Path:
    """``comparisons/ENGINE-MODEL-DATASET``, so that the same command finds its runs again."""
    options = plan(request, Path("comparisons"))[0].options
    name = f"{request.options.engine}-{options.model}-{options.dataset}"
    return Path("comparisons") / name.replace("/", "_").replace(":", "_")


def _baseline(request: Request, runs: Sequence[Run], out: Path) -> baselines.Baseline | Run:
    """One worker's throughput, or the run that measures it."""
    options = request.options
    if options.baseline is not None:
        return baselines.given(options.baseline)
    # Of the options that all have in common, if there is an algorithm without others.
    plain = next((run for run in runs if not run.entry.words), runs[0])
    return baselines.from_options(plain.options) or baselines.measuring_run(request, out)


def _command(request: Request, run: Run) -> list[str]:
    start = [sys.executable, "-m", request.options.run_module, *run.start_words()]
    if request.options.engine == "virtual":
        return start
    return [*children.launcher(request.options.mpirun, run.ranks), *start]


def _announce(runs: Sequence[Run], out: Path) -> None:
    done = sum(run.finished for run in runs)
    ended = f", {done} of them finished before" if done else ""
    print(f"{len(runs)} runs in {out}{ended}", file=sys.stderr, flush=True)


def _report(
    request: Request,
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
            notes=reading.unequal(figures),
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
    cells = table.cells(findings.rows, findings.target, "+-")
    print(f"{findings.title}\n\n{table.plain(cells)}\n")
    for note in findings.notes:
        print(note)
    if findings.baseline is not None:
        alone = findings.baseline
        print(f"one worker alone: {alone.samples_per_second:,.6g} samples/s, {alone.source}")
    if out is not None:
        print("\n".join([*plots.not_drawn(), f"report in {out / report.REPORT}"]))
    sys.stdout.flush()
