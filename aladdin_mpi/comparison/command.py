"""The whole of a comparison, from its command line to its report."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from aladdin_mpi.comparison import baseline as baselines
from aladdin_mpi.comparison import folder, plots, report
from aladdin_mpi.comparison.baseline import GIVEN, Baseline
from aladdin_mpi.comparison.figures import make_cells, plain, read_figures
from aladdin_mpi.comparison.options import ComparisonRequest
from aladdin_mpi.comparison.plan import Run, plan, read_runs, unequal
from aladdin_mpi.comparison.report import Findings
from aladdin_mpi.comparison.runner import Runner, check_launcher, launcher
from aladdin_mpi.errors import UserError

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
    options, out = request.options, request.options.out
    finished = read_runs(options.read)
    if out is not None:
        folder.check_out(out, options)
    runs = [run.figures for run in finished]
    if options.baseline is None:
        alone = baselines.of_runs([run.options for run in finished], runs)
    else:
        alone = Baseline(options.baseline, GIVEN)
    sizes = [(run.figures.label, run.options, run.figures.value("workers")) for run in finished]
    engines = {str(run.summary.get("engine")) for run in runs}
    findings = Findings(
        command=folder.command_line(request),
        engine=engines.pop() if len(engines) == 1 else "several",
        runs=runs,
        target=options.target_accuracy,
        baseline=alone,
        ideals=baselines.ideals(sizes, alone),
        notes=unequal(runs),
    )
    if out is not None:
        with folder.claimed(out, request):
            report.write(findings, out, folder.machine())
    _show(findings, out)
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
        check_launcher(options.mpirun, max(run.ranks for run in every))
    with folder.claimed(out, request) as lock:
        if isinstance(alone, Run):
            baselines.write_options(alone)
        runner = Runner(lambda run: _command(request, run), options.jobs, lock)
        ended = sum(run.finished for run in every)
        before = f", {ended} of them finished before" if ended else ""
        print(f"{len(every)} runs in {out}{before}", file=sys.stderr, flush=True)
        runner.run(every)
        failures = [str(failure) for failure in runner.failures]
        return _report(request, runs, alone, failures, out)


def _default_out(request: ComparisonRequest) -> Path:
    """``comparisons/ENGINE-MODEL-DATASET``, so that the same command finds its runs again."""
    options = plan(request, Path("comparisons"))[0].options
    name = f"{request.options.engine}-{options.model}-{options.dataset}"
    return Path("comparisons") / name.replace("/", "_").replace(":", "_")


def _baseline(request: ComparisonRequest, runs: Sequence[Run], out: Path) -> Baseline | Run:
    """One worker's throughput, or the run that measures it."""
    if request.options.baseline is not None:
        return Baseline(request.options.baseline, GIVEN)
    # Of the options that all have in common, if there is an algorithm without others.
    plain = next((run for run in runs if not run.entry.words), runs[0])
    return baselines.from_options(plain.options) or baselines.measuring_run(request, out)


def _command(request: ComparisonRequest, run: Run) -> list[str]:
    start = [sys.executable, "-m", request.options.run_module, *run.start_words()]
    if request.options.engine == "virtual":
        return start
    return [*launcher(request.options.mpirun, run.ranks), *start]


def _report(
    request: ComparisonRequest,
    runs: Sequence[Run],
    alone: Baseline | Run | None,
    failures: Sequence[str],
    out: Path,
) -> int:
    options = request.options
    ended = [run for run in runs if run.finished]
    if isinstance(alone, Run):
        alone = baselines.measured(alone) if alone.finished else None
    if ended:
        figures = [read_figures(run.folder, run.entry.label) for run in ended]
        sizes = [(run.entry.label, run.options, options.workers) for run in ended]
        findings = Findings(
            command=folder.command_line(request),
            engine=options.engine,
            runs=figures,
            target=options.target_accuracy,
            baseline=alone,
            shared=request.shared,
            ideals=baselines.ideals(sizes, alone),
            variants={run.entry.label: run.entry.words for run in runs if run.entry.words},
            failures=failures,
            notes=unequal(figures),
        )
        report.write(findings, out, folder.machine())
        _show(findings, out)
    if failures:
        again = f"{len(failures)} of {len(runs)} runs failed; the same command tries them again"
        print(*failures, again, sep="\n", file=sys.stderr)
    return 1 if failures else 0


def _show(findings: Findings, out: Path | None) -> None:
    cells = make_cells(findings.rows, findings.target, "+-")
    print(findings.title, "", plain(cells), "", *findings.notes, sep="\n")
    if (alone := findings.baseline) is not None:
        print(f"one worker alone: {alone.samples_per_second:,.6g} samples/s, {alone.source}")
    if out is not None:
        print(*plots.not_drawn(), f"report in {out / report.REPORT}", sep="\n")
    sys.stdout.flush()
