"""The command: search for the best candidate, try changes, and print the advice."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aladdin_mpi.advice import bottleneck, candidates, learning
from aladdin_mpi.advice.candidate_search import (
    NO_TIME,
    SHORT,
    TOO_LARGE,
    CandidateResult,
    CandidateSearch,
)
from aladdin_mpi.advice.candidates import Candidate, ClusterTraits
from aladdin_mpi.advice.learning import SampleEfficiency
from aladdin_mpi.advice.memory import least_models
from aladdin_mpi.advice.options import AdviceRequest, AdviseOptions, Change, grown
from aladdin_mpi.advice.report import Advice, Scaling, Tried, as_data, as_text, draw
from aladdin_mpi.comparison.figures import markdown, plain
from aladdin_mpi.errors import UserError
from aladdin_mpi.process import console, extras, files
from aladdin_mpi.process.files import write_whole

TEXT, DATA, PICTURE = "advice.md", "advice.json", "advice.png"
SHOWN = 12
"""Rows of the table on a terminal."""


RELIEF = "without bottleneck"
SCALED = 3
"""Number of algorithms that are also timed with other numbers of workers."""


def advise(request: AdviceRequest) -> Advice:
    """Carry out a request, and print the advice.

    Raises:
        UserError: unknown model or data, a folder in use, or no time for a single simulation.
    """
    _check_free(request.options)
    megabytes = _megabytes(request)
    on = candidates.ground(request, megabytes)
    names = candidates.names(request.options.algorithms, on.workers)
    report_progress = _progress(request)
    pilot = None
    if request.options.pilot:
        pilot = learning.pilot(request, on, names, report_progress)
    efficiency = _sample_efficiency(request, on, pilot)
    search = CandidateSearch(request, on, f"size:{megabytes:.6g}", efficiency, report_progress)
    entries = search.run(names)
    if all(entry.why_not == TOO_LARGE for entry in entries):
        raise UserError(
            f"--gpu-memory {request.options.gpu_memory:g}: expected room for "
            f"{_least(entries, on):.3g} GB or more, which the candidate with the least needs "
            "without activations. Divide the model among the GPUs of a node by fully_shard "
            "(docs/your-script.md), or use GPUs with more memory."
        )
    if entries[0].timed is None:
        for entry in entries:
            if entry.why_not not in (TOO_LARGE, NO_TIME):
                raise UserError(
                    f"{entry.candidate.describe()} cannot be simulated: {entry.why_not}"
                )
        raise UserError(
            f"--seconds {request.seconds(on.workers):g} is too short for one simulated run. "
            "Increase --seconds, or name fewer --algorithms."
        )
    tried = _try_changes(request, search, entries[0], on)
    scaling = _scaling(request, search, entries, on) if request.options.out is not None else {}
    advice = Advice(request, on, entries, *tried, scaling, search.part)
    report_progress("", 0, 0)
    _output(advice)
    return advice


def _least(entries: Sequence[CandidateResult], on: ClusterTraits) -> float:
    """Return the smallest GPU memory that a candidate needs, in GB."""
    return min(least_models(entry.candidate, on.node) for entry in entries) * on.megabytes / 1e3


def _check_free(options: AdviseOptions) -> None:
    """Raise UserError if the folder contains advice already, or cannot be one."""
    if options.out is None:
        return
    if options.out.exists() and not options.out.is_dir():
        raise UserError(f"--out {options.out}: expected a folder, got a file; choose another")
    if options.overwrite:
        return
    existing = [name for name in (TEXT, DATA, PICTURE) if (options.out / name).exists()]
    if existing:
        raise UserError(
            f"--out {options.out}: expected a folder without advice, got one with {existing[0]}; "
            "choose another, or add --overwrite"
        )


def _output(advice: Advice) -> None:
    """Print the advice, and write it to ``--out`` if given."""
    print(as_text(advice, plain, SHOWN))
    out = advice.request.options.out
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / TEXT, f"# Advice\n\n{as_text(advice, markdown, len(advice.entries))}\n")
    write_whole(out / DATA, files.written(as_data(advice), indent=2) + "\n")
    if extras.missing("matplotlib"):
        console.say(f"no {PICTURE}; to get it, {extras.command(['matplotlib'])}", sys.stderr)
    else:
        draw(advice, out / PICTURE)
    print(f"\nadvice written to {out}")


def _megabytes(request: AdviceRequest) -> float:
    """Return the size of the model's trainable parameters in fp32, in MB."""
    # Imported here because torch takes a second, and invalid options are reported before.
    import torch

    from aladdin_mpi.data.datasets import describe_set
    from aladdin_mpi.data.models import build_model
    from aladdin_mpi.run.trainer import module_of_size

    options = request.options
    if options.is_size:
        module = module_of_size(options.model)
    else:
        data = describe_set(options.dataset, options.data_dir, False)
        with torch.device("meta"):
            module = build_model(options.model, data.classes, data.channels, data.size)
    return sum(p.numel() for p in module.parameters() if p.requires_grad) * 4e-6


def _sample_efficiency(
    request: AdviceRequest, on: ClusterTraits, pilot: Mapping[str, SampleEfficiency] | None
) -> Callable[[Candidate], SampleEfficiency]:
    """Return the function that gives a candidate's sample efficiency."""

    def efficiency(candidate: Candidate) -> SampleEfficiency:
        if request.options.target == "time":
            return SampleEfficiency(1.0)
        if pilot is not None:
            return learning.in_rounds_of(pilot[candidate.algorithm], candidate, on)
        return learning.efficiency(candidate, on)

    return efficiency


def _try_changes(
    request: AdviceRequest, search: CandidateSearch, best: CandidateResult, on: ClusterTraits
) -> tuple[bottleneck.Bottleneck, float | None, list[Tried]]:
    """Return the bottleneck, samples/s after removing it, and the effect of each change."""
    assert best.timed is not None
    base = search.options(best.candidate, 1)
    limit = bottleneck.find(best.candidate, best.timed, on, base)
    trials = {RELIEF: (best.candidate, request.on(limit.relief))} if limit.relief else {}
    notes = {}
    for change in request.changes:
        candidate, changed, notes[change.text] = _changed(change, best.candidate, request, base, on)
        trials[change.text] = candidate, changed
    results = search.try_out(trials, growth=best.growth) if trials else {}
    tried = [(change, results[change.text], notes[change.text]) for change in request.changes]
    unblocked = results.get(RELIEF)
    return limit, None if isinstance(unblocked, str) else unblocked, tried


def _changed(
    change: Change, candidate: Candidate, request: AdviceRequest, base: Any, on: ClusterTraits
) -> tuple[Candidate, AdviceRequest, str]:
    fields, servers, note = dict(change.fields), candidate.servers, ""
    if change.workers is not None:
        fields |= grown(base, change.workers)
        hosts = fields["cluster.hosts"]
        servers = max(1, round(servers * hosts / on.hosts)) if servers else 0
        note = f"on {hosts} host{'s' * (hosts > 1)}" + (f", {servers} servers" if servers else "")
    if change.servers is not None:
        if not servers:
            note = f"{candidate.algorithm} has no servers"
        servers = change.servers if servers else 0
    return replace(candidate, servers=servers, spread=servers > 1), request.on(fields), note


def _scaling(
    request: AdviceRequest,
    search: CandidateSearch,
    entries: Sequence[CandidateResult],
    on: ClusterTraits,
) -> Scaling:
    """Return the speedups of the best algorithms with other numbers of workers."""
    base = search.options(entries[0].candidate, 1)
    chosen: dict[str, CandidateResult] = {}
    for entry in entries:
        if entry.timed is not None and len(chosen) < SCALED:
            chosen.setdefault(entry.candidate.algorithm, entry)
    trials, points = {}, {}
    for workers in sorted({max(2, on.workers // 4), max(2, on.workers // 2), 2 * on.workers}):
        for entry in chosen.values():
            change = Change("", {}, workers=workers)
            candidate, changed, _ = _changed(change, entry.candidate, request, base, on)
            name = f"{entry.candidate.describe()} {workers}"
            points[name] = entry, workers, candidates.ground(changed, on.megabytes).ideal
            trials[name] = candidate, changed
    unit = on.step / request.options.batch_size
    scaling: Scaling = {
        entry.candidate.describe(): [(on.workers, entry.rate * unit, on.ideal)]
        for entry in chosen.values()
    }
    for name, result in search.try_out(trials, SHORT).items():
        entry, workers, ideal = points[name]
        if not isinstance(result, str):
            scaling[entry.candidate.describe()].append((workers, result * unit, ideal))
    return {name: sorted(each) for name, each in scaling.items()}


def _progress(request: AdviceRequest) -> Callable[[str, int, int], None]:
    """Return a function that updates a progress bar, which is shown on a terminal unless quiet."""
    from tqdm import tqdm

    bar: Any = tqdm(
        total=1,
        file=sys.stderr,
        ascii=True,
        bar_format="{desc} |{bar:30}| {postfix}",
        disable=request.options.quiet or None,  # None: unless it is a terminal
    )

    def update(name: str, completed: int, total: int) -> None:
        if not total:
            bar.close()
            return
        bar.total, bar.n = total, completed
        bar.set_description_str(f"{completed} of {total} simulations")
        bar.set_postfix_str(name[:40])

    return update
