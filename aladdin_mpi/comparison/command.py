"""The comparison command: start missing runs, or read finished ones, and report."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aladdin_mpi
from aladdin_mpi.comparison import baseline as baselines
from aladdin_mpi.comparison import folder, plots
from aladdin_mpi.comparison.baseline import GIVEN, Baseline
from aladdin_mpi.comparison.figures import (
    ACCURACY,
    LOSS,
    MEASURES,
    Measure,
    RunFigures,
    TableRow,
    Target,
    as_csv,
    keys_shown,
    make_cells,
    make_rows,
    markdown,
    plain,
    read_figures,
)
from aladdin_mpi.comparison.folder import Machine
from aladdin_mpi.comparison.options import ComparisonRequest
from aladdin_mpi.comparison.plan import Run, plan, read_runs, stored_options, unequal
from aladdin_mpi.comparison.runner import Runner, check_launcher
from aladdin_mpi.hooks.recorder import rounded
from aladdin_mpi.options.general import OWN_DATA
from aladdin_mpi.process import files, guard
from aladdin_mpi.process.files import write_whole
from aladdin_mpi.process.launcher import launcher

REPORT = "report.md"
TABLE = "table.csv"
RESULT = "comparison.json"
FORMAT = "aladdin_mpi comparison 1"


@dataclass(frozen=True)
class Findings:
    """The results of a comparison."""

    command: str
    engine: str
    runs: Sequence[RunFigures]
    target: Target | None
    baseline: Baseline | None
    shared: Sequence[str] | None = None
    """Command-line options of every run; None if the runs were only read."""
    variants: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Additional command-line options by label."""
    ideals: Mapping[str, float] = field(default_factory=dict)
    """Ideal throughput in samples/s by label, if known."""
    failures: Sequence[str] = ()
    notes: Sequence[str] = ()

    @property
    def rows(self) -> list[TableRow]:
        """The rows of the table."""
        alone = None if self.baseline is None else self.baseline.samples_per_second
        return make_rows(self.runs, self.target, alone)

    @property
    def title(self) -> str:
        """Model, dataset, workers and engine; "several" for facts in which the runs differ."""
        facts = {name: self._common(name) for name in ("model", "dataset", "workers")}
        if self.is_of_scripts:
            facts["dataset"] = "data of a script"
        time = "simulated" if self.engine == "virtual" else "MPI"
        return "{model} on {dataset}, {workers} workers, {time}".format(**facts, time=time)

    @property
    def is_of_scripts(self) -> bool:
        """Whether users' scripts made the runs."""
        return self._common("dataset") == OWN_DATA

    def _common(self, name: str) -> str:
        values = {str(run.summary.get(name)) for run in self.runs}
        return values.pop() if len(values) == 1 else "several"


def write(findings: Findings, out: Path, facts: Machine) -> None:
    """Write all files of the report."""
    write_whole(out / TABLE, as_csv(findings.rows))
    write_whole(out / RESULT, files.written(as_json(findings, facts), indent=2) + "\n")
    pictures = plots.draw(
        findings.runs, findings.rows, out, findings.title, findings.target, findings.ideals
    )
    write_whole(out / REPORT, _markdown(findings, facts, pictures))


def as_json(findings: Findings, facts: Machine) -> dict[str, Any]:
    """Return all results for JSON: SI units, fractions from 0 to 1, null for missing figures."""
    alone = None if findings.baseline is None else findings.baseline.samples_per_second
    result: dict[str, Any] = {
        "format": FORMAT,
        "version": aladdin_mpi.__version__,
        "command": findings.command,
        "machine": dict(facts),
        "engine": findings.engine,
        "options": None if findings.shared is None else list(findings.shared),
        "variants": {label: list(words) for label, words in findings.variants.items()},
        "target_accuracy": _value_of(findings.target, ACCURACY),
        "target_loss": _value_of(findings.target, LOSS),
        "baseline": None if findings.baseline is None else asdict(findings.baseline),
        "ideal_samples_per_second": findings.ideals,
        "rows": [asdict(row) for row in findings.rows],
        "runs": [
            {
                "label": run.label,
                "folder": str(run.folder),
                "algorithm": run.summary["algorithm"],
                "seed": run.summary["seed"],
                **run.all_values(findings.target, alone),
                "evaluations": [asdict(each) for each in run.evaluations],
            }
            for run in findings.runs
        ],
        "failures": list(findings.failures),
        "notes": [*findings.notes, *definitions(findings)],
    }
    return dict(rounded(result))


def _value_of(target: Target | None, measure: Measure) -> float | None:
    return target.value if target is not None and target.measure is measure else None


def definitions(findings: Findings) -> list[str]:
    """Return the definitions of the table's columns."""
    rows = findings.rows
    keys = set(keys_shown(rows))
    most = max(row.runs for row in rows)
    clock = "simulated seconds" if findings.engine == "virtual" else "seconds"
    n = f"up to {most}" if any(row.runs != most for row in rows) else str(most)
    notes = [
        f"Figures are means over runs (seeds) ± sample standard deviation; n = {n}."
        if most > 1
        else "n = 1: one run each, so the spread over seeds is unknown."
    ]
    texts = {
        "test_accuracy": "accuracy: test accuracy of the global model at the end of the run. The "
        "table is sorted by accuracy, then by time.",
        "test_loss": "loss: test loss of the global model at the end of the run. The table is "
        "sorted by loss, then by time.",
        "seconds": f"time: training time in {clock}, without set-up, evaluations and checkpoints.",
        "seconds_to_target": f"time to {findings.target}: training time until the first "
        "evaluation that reaches it, without interpolation, so its resolution is --eval-every. The "
        "mean is over the runs that reached it: (k of n).",
        "samples_per_second": "throughput: of all workers.",
        "wait_fraction": "waiting: share of the training time that workers waited for "
        "communication.",
        "bytes_sent_per_step": "bytes/step: sent per step and worker, without received bytes and "
        "those sent by servers.",
        "coalesced_fraction": "coalesced: share of the gradients that were added to another one "
        "before they were sent, because the network was too slow; none is lost.",
    }
    notes += [text for key, text in texts.items() if key in keys]
    if findings.is_of_scripts and not keys.intersection(measure.key for measure in MEASURES):
        notes.append(
            "No test_accuracy or test_loss was measured, so only speed is compared. Return one of "
            "them from evaluate= of DataParallel."
        )
    if findings.baseline is not None:
        notes.append(
            f"speedup: throughput relative to one worker alone, "
            f"{findings.baseline.samples_per_second:,.6g} samples/s ({findings.baseline.source})."
        )
    else:
        notes.append("No speedup: the throughput of one worker alone is unknown (--baseline).")
    if ideals := findings.ideals.values():
        low, high = min(ideals), max(ideals)
        values = f"{low:,.6g}" if low == high else f"{low:,.6g} to {high:,.6g}"
        notes.append(
            f"ideal (dashed in {plots.THROUGHPUT}): sum of the workers' individual speeds, with "
            f"slowdowns: {values} samples/s."
        )
    return notes


def _markdown(findings: Findings, facts: Machine, pictures: Sequence[str]) -> str:
    cells = make_cells(findings.rows, findings.target, "±")
    lines = [*findings.notes, *definitions(findings), *plots.not_drawn()]
    notes = "\n".join(f"- {line}" for line in lines)
    parts = [f"# Comparison: {findings.title}", markdown(cells), notes]
    if findings.failures:
        parts += ["## Failed runs", "\n".join(f"- {line}" for line in findings.failures)]
    parts += [f"![{Path(name).stem}]({name})" for name in pictures]
    parts += ["## Command", f"    {findings.command}", *_options(findings)]
    versions = {"aladdin_mpi": aladdin_mpi.__version__, **facts}
    lines = [f"- {key}: {value}" for key, value in versions.items() if value is not None]
    place = "Machine" if findings.shared is not None else "Machine of this report"
    parts += [f"## {place} and versions", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _options(findings: Findings) -> list[str]:
    if findings.shared is None:
        folders = "\n".join(f"- {run.label}: {run.folder}" for run in findings.runs)
        return ["The runs, whose options are in config.toml:", folders]
    words = shlex.join(findings.shared)
    of_all = f"`{words}`" if words else "defaults"
    lines = [f"- {name}: `{shlex.join(more)}`" for name, more in findings.variants.items()]
    return [
        f"Options of every run: {of_all}. All options of a run are in "
        "runs/LABEL/seed-SEED/config.toml.",
        *(["Additional options:", "\n".join(lines)] if lines else []),
    ]


def compare(request: ComparisonRequest) -> int:
    """Make or read the requested runs, report, and return the exit status.

    Raises:
        UserError: an invalid request, or mpirun started the comparison.
        RefusedError: the same, at ranks other than 0.
        TerminatedError: a signal stopped the comparison; all its runs have ended.
    """
    guard.refuse_launcher(
        "the comparison starts the ranks of its runs (--engine mpi, --mpirun).",
        uses_mpirun=True,
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
        target=options.target,
        baseline=alone,
        ideals=baselines.ideals(sizes, alone),
        notes=unequal(runs),
    )
    if out is not None:
        with folder.claimed(out, request):
            write(findings, out, folder.machine())
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
            alone.write_options(only_set=True)  # the others are left to a script
        runner = Runner(lambda run: _command(request, run), options.jobs, lock)
        finished = sum(run.finished for run in every)
        before = f", {finished} already finished" if finished else ""
        print(f"{len(every)} runs in {out}{before}", file=sys.stderr, flush=True)
        runner.run(every)
        failures = [str(failure) for failure in runner.failures]
        return _report(request, runs, alone, failures, out)


def _default_out(request: ComparisonRequest) -> Path:
    """Return ``comparisons/ENGINE-...``, in which the same command finds its runs."""
    script = request.options.script
    if script is None:
        options = plan(request, Path("comparisons"))[0].options
        name = f"{options.model}-{options.dataset}".replace("/", "_").replace(":", "_")
    else:
        name = script.stem
    return Path("comparisons") / f"{request.options.engine}-{name}"


def _baseline(request: ComparisonRequest, runs: Sequence[Run], out: Path) -> Baseline | Run | None:
    """Return the baseline, or the run that measures it; None if it follows from the runs."""
    if request.options.baseline is not None:
        return Baseline(request.options.baseline, GIVEN)
    if baselines.from_options(_plain(runs).options) is not None:
        return None
    return baselines.measuring_run(request, out)


def _plain(runs: Sequence[Run]) -> Run:
    """Return the first run that has only the common options, or the first one."""
    return next((run for run in runs if not run.entry.words), runs[0])


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
    finished = [run for run in runs if run.finished]
    if finished:
        figures = [read_figures(run.folder, run.entry.label) for run in finished]
        # The batch size of a script is known only from its run.
        used = {run: stored_options(run.folder, options.run_options) for run in finished}
        sizes = [(run.entry.label, each, options.workers) for run, each in used.items()]
        if isinstance(alone, Run):
            alone = baselines.measured(alone) if alone.finished else None
        elif alone is None:
            alone = baselines.from_options(used[_plain(finished)])
        findings = Findings(
            command=folder.command_line(request),
            engine=options.engine,
            runs=figures,
            target=options.target,
            baseline=alone,
            shared=request.shared,
            ideals=baselines.ideals(sizes, alone),
            variants={run.entry.label: run.entry.words for run in runs if run.entry.words},
            failures=failures,
            notes=unequal(figures),
        )
        write(findings, out, folder.machine())
        _show(findings, out)
    if failures:
        again = f"{len(failures)} of {len(runs)} runs failed; rerun the same command to retry them"
        print(*failures, again, sep="\n", file=sys.stderr)
    return 1 if failures else 0


def _show(findings: Findings, out: Path | None) -> None:
    cells = make_cells(findings.rows, findings.target, "+-")
    print(findings.title, "", plain(cells), "", *findings.notes, sep="\n")
    if (alone := findings.baseline) is not None:
        print(f"baseline (one worker): {alone.samples_per_second:,.6g} samples/s, {alone.source}")
    if out is not None:
        print(*plots.not_drawn(), f"report written to {out / REPORT}", sep="\n")
    sys.stdout.flush()
