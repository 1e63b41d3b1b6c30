"""The baseline of speedups: the throughput of one worker alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from aladdin_mpi.comparison.figures import RunFigures, read_figures
from aladdin_mpi.comparison.options import ComparisonRequest
from aladdin_mpi.comparison.plan import OPTIONS, PlanEntry, Run, changes_of, ranks_of
from aladdin_mpi.errors import UserError
from aladdin_mpi.options import reader
from aladdin_mpi.options.algorithms import ALGORITHMS
from aladdin_mpi.options.general import LENGTHS
from aladdin_mpi.options.run import RunOptions, SimulateOptions
from aladdin_mpi.options.settings import Setting, build

LABEL = "baseline"
GIVEN = "given by --baseline"


@dataclass(frozen=True)
class Baseline:
    """The throughput of one worker alone; ``source`` describes its origin."""

    samples_per_second: float
    source: str


def from_options(options: RunOptions) -> Baseline | None:
    """Return the baseline from a modelled step time; None if it is not modelled."""
    modelled = isinstance(options, SimulateOptions) or options.compute == "timed"
    if not modelled or options.compute_time is None:
        return None
    # The mean of a log-normal factor whose logarithm has the mean 0.
    step = options.compute_time * math.exp(options.jitter**2 / 2)
    return Baseline(
        options.step_size / step,
        f"calculated: a step of {options.step_size} samples in {step:.6g} s",
    )


def ideals(
    runs: Iterable[tuple[str, RunOptions, float | None]], alone: Baseline | None
) -> dict[str, float]:
    """Return the ideal throughput by label: the sum of the workers' individual speeds.

    Args:
        runs: label, options and number of workers of each run.
        alone: baseline without slowdown; None if only the options determine it.
    """
    throughputs = {}
    for label, options, workers in runs:
        # A variant may have another modelled step time than the other runs.
        modelled = None if alone is not None and alone.source == GIVEN else from_options(options)
        known = modelled or alone
        if known is not None and workers is not None:
            speeds = [1 / options.slowdown.get(worker, 1.0) for worker in range(int(workers))]
            throughputs[label] = known.samples_per_second * sum(speeds)
    return throughputs


def measuring_run(request: ComparisonRequest, out: Path) -> Run:
    """Return the short run over MPI that measures one worker, without a server if possible.

    Its options are written to a file in the comparison's folder.
    """
    options = request.options
    shared = reader.read(options.run_options, request.shared, "", "")
    # These options refer to other ranks, or to the length of the compared runs.
    replaced = ("slowdown", "checksum", *LENGTHS, "servers", "algorithm", "run_dir", "overwrite")
    kept = {path: s for path, s in shared.items() if path[0] not in replaced}
    algorithm, seed = _algorithm(build(options.run_options, kept)), options.seeds[0]
    own = {"algorithm": algorithm, "steps": options.baseline_steps, "seed": seed, "eval_every": 0}
    own |= {"slowdown": {}, "checksum": False}  # a script may have others
    settings = kept | {(name,): Setting(value, name) for name, value in own.items()}
    built = build(options.run_options, settings)
    ranks = ranks_of(algorithm, built, 1)
    of_script = options.script, options.script_arguments
    # The name has facts that may differ between comparisons. Other options get another number.
    name = f"{algorithm}-{options.baseline_steps}-steps"

    def run_in(name: str) -> Run:
        folder = out / LABEL / name
        words = ("--config", str(folder / OPTIONS))
        return Run(PlanEntry(LABEL, algorithm), seed, folder, words, built, ranks, *of_script)

    names = chain([name], (f"{name}-{number}" for number in count(2)))
    return next(run for run in map(run_in, names) if not changes_of(run))


def _algorithm(options: RunOptions) -> str:
    """Return an algorithm that runs with one worker, without a server if possible."""
    for algorithm in sorted(ALGORITHMS.values(), key=lambda a: a.has_servers):
        with suppress(UserError):
            ranks_of(algorithm.name, options, 1)
            return algorithm.name
    raise UserError(
        "--baseline: no algorithm of the comparison runs with one worker. Pass the throughput of "
        "one worker here."
    )


def measured(run: Run) -> Baseline:
    """Return the baseline from a finished measuring run."""
    figures = read_figures(run.folder, LABEL)
    servers = run.ranks - 1
    others = f" and {servers} server{'s' * (servers > 1)}" if servers else ""
    return Baseline(
        figures.value("samples_per_second") or 0.0,
        f"measured: {run.entry.algorithm} with 1 worker{others}, "
        f"{figures.summary['samples']} samples in {figures.summary['seconds']:.4g} s",
    )


def of_runs(options: Sequence[RunOptions], figures: Sequence[RunFigures]) -> Baseline | None:
    """Return the baseline from the options of finished runs, or from runs with one worker."""
    first, *others = (from_options(each) for each in options)
    if first is not None and all(each == first for each in others):
        return first
    alone = [run for run in figures if run.summary.get("workers") == 1]
    rates = [rate for run in alone if (rate := run.value("samples_per_second")) is not None]
    if not rates:
        return None
    source = f"measured: mean over the runs with 1 worker ({len(rates)}): {alone[0].label}"
    return Baseline(sum(rates) / len(rates), source)
