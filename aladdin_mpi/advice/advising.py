"""The command: search the best candidate, try changes, and print the advice."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aladdin_mpi.advice import bottleneck, candidates, learning
from aladdin_mpi.advice.candidate_search import SHORT, CandidateResult, CandidateSearch
from aladdin_mpi.advice.candidates import Candidate, ClusterTraits
from aladdin_mpi.advice.learning import SampleEfficiency
from aladdin_mpi.advice.options import AdviceRequest, AdviseOptions, Change, grown
from aladdin_mpi.advice.report import Advice, Scaling, as_data, draw, in_words
from aladdin_mpi.comparison.figures import markdown, plain
from aladdin_mpi.errors import UserError
from aladdin_mpi.process import console, extras, files
from aladdin_mpi.process.files import write_whole

TEXT, DATA, PICTURE = "advice.md", "advice.json", "advice.png"
SHOWN = 12
"""Rows of the table on a terminal."""


RELIEVED = "relieved"
SCALED = 3
"""Algorithms that are tried with other numbers of workers."""


def advise(request: AdviceRequest) -> Advice:
    """Carry a request out, and print the advice.

    Raises:
        UserError: the model or the data are unknown, the folder is in use, or nothing could be run.
    """
    _check_free(request.options)
    megabytes = _megabytes(request)
    on = candidates.ground(request, megabytes)
    names = candidates.names(request.options.algorithms, on.workers)
    tell = _progress(request)
    pilot = learning.pilot(request, names, tell) if request.options.pilot else None
    race = CandidateSearch(request, on, f"size:{megabytes:.6g}", _share(request, on, pilot), tell)
    entries = race.run(names)
    if entries[0].timed is None:
        raise UserError(
            f"--seconds {request.seconds(on.workers):g} is too short for one simulated run. "
            "Increase --seconds, or name fewer --algorithms."
        )
    tried = _try_changes(request, race, entries[0], on)
    scaling = _scaling(request, race, entries, on) if request.options.out is not None else {}
    advice = Advice(request, on, entries, *tried, scaling, race.part)
    tell("", 0, 0)
    _give(advice)
    return advice


def _check_free(options: AdviseOptions) -> None:
    """Raise UserError if there is advice in the folder already."""
    if options.out is None or options.overwrite:
        return
    there = [name for name in (TEXT, DATA, PICTURE) if (options.out / name).exists()]
    if there:
        raise UserError(
            f"--out {options.out}: expected a folder without advice, got one with {there[0]}; "
            "choose another, or add --overwrite"
        )


def _give(advice: Advice) -> None:
    """Print the advice, and write it if that is asked for."""
    print(in_words(advice, plain, SHOWN))
    out = advice.request.options.out
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / TEXT, f"# Advice\n\n{in_words(advice, markdown, len(advice.entries))}\n")
    write_whole(out / DATA, files.written(as_data(advice), indent=2) + "\n")
    if extras.missing("matplotlib"):
        console.say(f"no picture: {extras.command(['matplotlib'])} for it", sys.stderr)
    else:
        draw(advice, out / PICTURE)
    print(f"\nwritten to {out}")


def _megabytes(request: AdviceRequest) -> float:
    """The size of the model's trainable parameters in fp32."""
    # Here, since torch takes a second that a mistake in the options should not.
    import torch

    from aladdin_mpi.data.datasets import describe_set
    from aladdin_mpi.data.models import build_model
    from aladdin_mpi.run.trainer import SIZE_PREFIX, module_of_size

    options = request.options
    if options.model.startswith(SIZE_PREFIX):
        module = module_of_size(options.model)
    else:
        data = describe_set(options.dataset, options.data_dir, False)
        with torch.device("meta"):
            module = build_model(options.model, data.classes, data.channels, data.size)
    return sum(p.numel() for p in module.parameters() if p.requires_grad) * 4e-6


def _share(
    request: AdviceRequest, on: ClusterTraits, pilot: Mapping[str, SampleEfficiency] | None
) -> Callable[[Candidate], SampleEfficiency]:
    """The sample efficiency of a candidate."""

    def share(candidate: Candidate) -> SampleEfficiency:
        if request.options.target == "time":
            return SampleEfficiency(1.0)
        if pilot is not None:
            return pilot[candidate.algorithm]
        workers = on.hosts if candidate.has_nodes else on.workers
        return learning.measured(candidate.algorithm, workers)

    return share


def _try_changes(
    request: AdviceRequest, race: CandidateSearch, best: CandidateResult, on: ClusterTraits
) -> tuple[bottleneck.Bottleneck, float | None, list[tuple[Change, float | None, str]]]:
    """The bottleneck, what its relief would bring, and each change of ``--what-if``."""
    assert best.timed is not None
    base = race.options(best.candidate, 1)
    found = bottleneck.find(best.candidate, best.timed, on, base)
    asked = {RELIEVED: (best.candidate, request.on(found.relief))} if found.relief else {}
    notes = {}
    for change in request.changes:
        candidate, changed, notes[change.text] = _changed(change, best.candidate, request, base, on)
        asked[change.text] = candidate, changed
    rates = race.try_out(asked, growth=best.growth) if asked else {}
    tried = [(change, rates.get(change.text), notes[change.text]) for change in request.changes]
    return found, rates.get(RELIEVED), tried


def _changed(
    change: Change, candidate: Candidate, request: AdviceRequest, base: Any, on: ClusterTraits
) -> tuple[Candidate, AdviceRequest, str]:
    fields, servers, note = dict(change.fields), candidate.servers, ""
    if change.workers is not None:
        fields |= grown(base, change.workers)
        hosts = fields["cluster.hosts"]
        servers = max(1, round(servers * hosts / on.hosts)) if servers else 0
        note = f"on {hosts} hosts" + (f", {servers} servers" if servers else "")
    if change.servers is not None:
        if not servers:
            note = f"{candidate.algorithm} has no servers"
        servers = change.servers if servers else 0
    return replace(candidate, servers=servers, spread=servers > 1), request.on(fields), note


def _scaling(
    request: AdviceRequest,
    race: CandidateSearch,
    entries: Sequence[CandidateResult],
    on: ClusterTraits,
) -> Scaling:
    """The best of each of the first algorithms with other numbers of workers."""
    base = race.options(entries[0].candidate, 1)
    chosen: dict[str, CandidateResult] = {}
    for entry in entries:
        if entry.timed is not None and len(chosen) < SCALED:
            chosen.setdefault(entry.candidate.algorithm, entry)
    asked, points = {}, {}
    for workers in sorted({max(2, on.workers // 4), max(2, on.workers // 2), 2 * on.workers}):
        for entry in chosen.values():
            change = Change("", {}, workers=workers)
            candidate, changed, _ = _changed(change, entry.candidate, request, base, on)
            name = f"{entry.candidate.describe()} {workers}"
            points[name] = entry, workers, candidates.ground(changed, on.megabytes).ideal
            asked[name] = candidate, changed
    unit = on.step / request.options.batch_size
    found: Scaling = {
        entry.candidate.describe(): [(on.workers, entry.rate * unit, on.ideal)]
        for entry in chosen.values()
    }
    for name, rate in race.try_out(asked, SHORT).items():
        entry, workers, ideal = points[name]
        found[entry.candidate.describe()].append((workers, rate * unit, ideal))
    return {name: sorted(each) for name, each in found.items()}


def _progress(request: AdviceRequest) -> Callable[[str, int, int], None]:
    """A bar on a terminal; nothing elsewhere, or if that is asked for."""
    from tqdm import tqdm

    bar: Any = tqdm(
        total=1,
        file=sys.stderr,
        ascii=True,
        bar_format="{desc} |{bar:30}| {postfix}",
        disable=request.options.quiet or None,  # None: unless it is a terminal
    )

    def tell(what: str, done: int, asked: int) -> None:
        if not asked:
            bar.close()
            return
        bar.total, bar.n = asked, done
        bar.set_description_str(f"{done} of {asked} virtual runs")
        bar.set_postfix_str(what[:40])

    return tell
