"""The advice as a table, text, command lines and JSON."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aladdin_mpi.advice.bottleneck import Bottleneck, classify
from aladdin_mpi.advice.candidate_search import NO_TIME, TIE, CandidateResult, TrialResult
from aladdin_mpi.advice.candidates import REFERENCE, Candidate, ClusterTraits
from aladdin_mpi.advice.learning import SampleEfficiency
from aladdin_mpi.advice.memory import server_models, worker_models
from aladdin_mpi.advice.options import AdviceRequest, AdviseOptions, Change
from aladdin_mpi.comparison.plots import COLOURS, MARKERS, save
from aladdin_mpi.process.console import number, percent, throughput

UNKNOWN = "/path/to"
SECONDS_PER_DAY = 86400
STEPS = 100
"""Steps of a timed run of a model that is defined only by its size."""


def mpirun(candidate: Candidate, on: ClusterTraits, options: AdviseOptions) -> str:
    """Return the command for Open MPI, in an allocation of the cluster's hosts.

    Ranks are mapped to the hosts in turn, so that each has its share of workers, and may exceed the
    slots because of the servers. Servers are the first ranks; unless they are spread over the
    hosts, ranks are numbered host by host.
    """
    numbering = [] if candidate.spread else ["--rank-by", "slot"]
    ranks = str(candidate.servers + on.workers)
    start = ["mpirun", "--map-by", "node:OVERSUBSCRIBE", *numbering, "-np", ranks]
    words = ["python", "-m", "aladdin_mpi.train", *_words(candidate, on, options)]
    return shlex.join([*start, *words])


def sbatch(candidate: Candidate, on: ClusterTraits, options: AdviseOptions) -> str:
    """Return the command for Slurm with the package's script; empty if hosts differ in workers."""
    each, *others = set(on.on_host)
    if others:
        return ""
    setting = "SPREAD_SERVERS=yes " if candidate.spread else ""
    resources = [f"--nodes={on.hosts}", f"--gpus-per-node={each}", f"--ntasks-per-node={each}"]
    words = ["sbatch", *resources, "slurm/train.sbatch", *_words(candidate, on, options)]
    return setting + shlex.join(words)


def remark(options: AdviseOptions) -> str:
    """Return an instruction to follow before running a command line; empty if none is needed."""
    if options.is_size:
        return (
            f"{options.model} has no gradients, so these runs only time the messages of {STEPS} "
            "steps; name your --model and --dataset to train."
        )
    if any(word.startswith(UNKNOWN) for word in _data(options)):
        folder = f"{UNKNOWN}/{options.dataset}"
        return f"Replace {folder} with the folder that holds train/CLASS and val/CLASS."
    return ""


def _words(candidate: Candidate, on: ClusterTraits, options: AdviseOptions) -> list[str]:
    batch = ["--batch-size", str(options.batch_size)]
    if options.is_size:
        timed = ["--compute", "timed", "--compute-time", f"{on.step:g}", "--steps", str(STEPS)]
        return [*candidate.words, "--model", options.model, *batch, *timed]
    rate = [] if options.lr is None else ["--lr", f"{options.lr:g}"]
    return [*candidate.words, "--model", options.model, *_data(options), *batch, *rate]


def _data(options: AdviseOptions) -> list[str]:
    """Return the dataset options; ``imagenet`` has sizes only, so training uses a folder."""
    from aladdin_mpi.data.builtin_sets import VISION_SETS

    folder = [] if options.data_dir is None else ["--data-dir", str(options.data_dir)]
    if options.dataset == "imagenet":
        return ["--dataset", "imagefolder", *(folder or ["--data-dir", f"{UNKNOWN}/imagenet"])]
    download = ["--download"] if options.dataset in VISION_SETS else []
    return ["--dataset", options.dataset, *folder, *download]


MOST = 14
"""Largest number of bars in the picture."""


def draw(advice: Advice, path: Path) -> None:
    """Draw speedups, and their scaling, into a PNG file."""
    from matplotlib.figure import Figure

    known = [entry for entry in advice.entries if entry.timed is not None][:MOST]
    panels = 2 if advice.scaling else 1
    figure = Figure(figsize=(6.5 * panels, 0.34 * len(known) + 1.4), layout="constrained")
    axis = figure.add_subplot(1, panels, 1)
    places = range(len(known))
    speeds = [advice.speed_up(entry.rate) for entry in known]
    lows, highs = ([advice.speed_up(entry.between[end]) for entry in known] for end in (0, 1))
    errors = [
        [speed - low for speed, low in zip(speeds, lows, strict=True)],
        [high - speed for speed, high in zip(speeds, highs, strict=True)],
    ]
    axis.barh(places, speeds, xerr=errors, color=COLOURS[0], ecolor="grey", label="speedup")
    if advice.weighs:
        effective = [advice.speed_up(entry.score) for entry in known]
        axis.plot(effective, places, "D", color=COLOURS[1], label="times sample efficiency")
    axis.axvline(advice.ground.ideal, color="grey", linewidth=0.8, linestyle="--", label="ideal")
    axis.set_yticks(places, [entry.candidate.describe() for entry in known])
    axis.invert_yaxis()
    axis.set_xlabel(f"speedup with {advice.ground.workers} workers")
    axis.legend(fontsize="small")
    if advice.scaling:
        _draw_scaling(advice, figure.add_subplot(1, panels, 2))
    save(figure, path)


def _draw_scaling(advice: Advice, axis: Any) -> None:
    for turn, (name, points) in enumerate(advice.scaling.items()):
        colour, marker = COLOURS[turn % len(COLOURS)], MARKERS[turn]
        workers, speeds, _ = zip(*points, strict=True)
        axis.plot(workers, speeds, marker=marker, color=colour, label=name)
        if (end := knee(points)) is not None:
            axis.axvline(end, color=colour, linewidth=0.6, linestyle=":")
    workers, _, ideals = zip(*next(iter(advice.scaling.values())), strict=True)
    axis.plot(workers, ideals, "--", color="grey", label="ideal")
    axis.set_xlabel("workers")
    axis.set_ylabel("speedup")
    axis.legend(fontsize="small")
    axis.grid(alpha=0.3)


GAIN = 1.05
"""Smallest factor of throughput that is reported as an improvement."""
EFFICIENT = 0.8
"""Share of the ideal speedup at which an algorithm has its knee."""
Tried = tuple[Change, TrialResult, str]
"""A change, its result, and a note on its side effects."""
Scaling = dict[str, list[tuple[int, float, float]]]
"""For each candidate, tuples of workers, speedup and ideal speedup."""


@dataclass(frozen=True)
class Advice:
    """The results of a search.

    Attributes:
        entries: the candidates, the best first.
        unblocked: samples per second of the best after removing its bottleneck.
        tried: the changes of ``--what-if``.
        scaling: speedups with other numbers of workers.
        part: the part of the cluster used in most runs; None if all used the whole of it.
    """

    request: AdviceRequest
    ground: ClusterTraits
    entries: Sequence[CandidateResult]
    bottleneck: Bottleneck
    unblocked: float | None
    tried: Sequence[Tried]
    scaling: Scaling = field(default_factory=dict)
    part: ClusterTraits | None = None

    @property
    def best(self) -> CandidateResult:
        """The recommended candidate."""
        return self.entries[0]

    def speed_up(self, rate: float) -> float:
        """Return the speedup over one worker."""
        return rate * self.ground.step / self.request.options.batch_size

    @property
    def weighs(self) -> bool:
        """Whether candidates are ranked by effective throughput."""
        return self.request.options.target == "accuracy"


# -- text --------------------------------------------------------------------------------
Table = Callable[[Sequence[Sequence[str]], Collection[int]], str]
"""Renders rows as a table, given the columns that are aligned left."""
LEFT = (1, 2, 5)


def as_text(advice: Advice, table: Table, most: int) -> str:
    """Return the advice as text; its table has the first ``most`` candidates."""
    parts = [_recommendation(advice), *_commands(advice), _list("Reasons", _reasons(advice))]
    parts += [table(rows(advice)[: most + 1], LEFT), *_changes(advice), *_knees(advice)]
    return "\n\n".join([*parts, _list("Notes", _notes(advice, most))])


def _list(title: str, items: Iterator[str]) -> str:
    return "\n".join([f"{title}:", "", *(f"- {item}" for item in items)])


def _recommendation(advice: Advice) -> str:
    best, on = advice.best, advice.ground
    text = (
        f"Recommended: {best.candidate.describe()}, for {on.workers} workers on {on.hosts} "
        f"host{'s' * (on.hosts > 1)}: {throughput(best.rate)}, speedup "
        f"{advice.speed_up(best.rate):.1f} (ideal {on.ideal:.1f})."
    )
    if untried := untried_algorithms(advice.entries):
        text += (
            f" Possibly faster, but not simulated for lack of time: {', '.join(untried)}. "
            "Increase --seconds."
        )
    return text


def untried_algorithms(entries: Sequence[CandidateResult]) -> list[str]:
    """Return the algorithms that could be the best but were not simulated within the time limit."""
    known = {entry.candidate.algorithm for entry in entries if entry.timed is not None}
    best = max(entry.score for entry in entries)
    names = (
        entry.candidate.algorithm
        for entry in entries
        if entry.why_not == NO_TIME and entry.possible > best
    )
    return [name for name in dict.fromkeys(names) if name not in known]


def _reasons(advice: Advice) -> Iterator[str]:
    best, on, options = advice.best, advice.ground, advice.request.options
    low, high = best.between
    yield (
        f"Throughput: {throughput(best.rate)} ({number(low, 3)} to {number(high, 3)}) with "
        f"{options.model} ({number(on.megabytes, 3)} MB) and steps of {number(on.step, 3)} s for "
        f"{options.batch_size} samples; {percent(advice.speed_up(best.rate) / on.ideal)} of the "
        "ideal speedup."
    )
    yield from _comparison(advice)
    text = f"Bottleneck: {advice.bottleneck.text}."
    if advice.unblocked is not None:
        factor = advice.unblocked / best.rate
        effect = "hardly change" if factor < GAIN else f"rise by a factor of {factor:.2f}"
        text += f" With {advice.bottleneck.change}, throughput would {effect}."
    yield text
    yield from _costs(advice)


def bytes_per_day(advice: Advice) -> float:
    """Return the bytes that the busiest link carries per day, in one direction; 0 on one host."""
    timed = advice.best.timed
    if timed is None or not timed.links:
        return 0.0
    return timed.load * advice.ground.links[timed.links[0].host] * SECONDS_PER_DAY


def _costs(advice: Advice) -> Iterator[str]:
    """Yield the traffic, and the memory of a worker if it has been measured."""
    timed, megabytes = advice.best.timed, advice.ground.megabytes
    if (nbytes := bytes_per_day(advice)) and timed is not None:
        link = timed.links[0]
        way = "sends" if link.way == "out" else "receives"
        yield f"Traffic: host {link.host} {way} most, {_gigabytes(nbytes)} per day."
    if (models := worker_models(advice.best.candidate, advice.ground.node)) is not None:
        device, pinned = (f"{n:g} models ({_gigabytes(n * megabytes * 1e6)})" for n in models)
        yield (
            f"Memory of a worker: {device} on its GPU and {pinned} in pinned host memory, with SGD "
            "and without activations."
        )
    if (server := _server_models(advice)) is not None:
        yield (
            f"Memory of a server: {server:.1f} models ({_gigabytes(server * megabytes * 1e6)}) on "
            "its host."
        )


def _server_models(advice: Advice) -> float | None:
    """Return the memory of a server of the best candidate in models; None if not measured."""
    candidate, on = advice.best.candidate, advice.ground
    return server_models(candidate, on.workers // (on.node if candidate.has_islands else 1))


def _gigabytes(nbytes: float) -> str:
    return f"{number(nbytes / 1e9, 3)} GB"


def _comparison(advice: Advice) -> Iterator[str]:
    """Yield the reason for preferring the best candidate to the baseline, or to the next one."""
    best = advice.best
    others = [entry for entry in advice.entries if entry.timed and entry is not best]
    other = next((entry for entry in others if entry.candidate == REFERENCE), None)
    other = other or next(iter(others), None)
    if other is None or not other.score:
        yield "Comparison: no other candidate was simulated in time; increase --seconds."
        return
    name, factor = other.candidate.describe(), best.score / other.score
    ratio = "equal" if abs(factor - 1) < TIE else f"shorter by a factor of {factor:.2f}"
    text = f"{'Time to an accuracy' if advice.weighs else 'Time'}, compared with {name}: {ratio}"
    if advice.weighs:
        text += f" (sample efficiency {best.share.value:.2f} against {other.share.value:.2f})"
        if not best.share.is_sure:
            text += f"; the sample efficiency of {best.candidate.algorithm} is an estimate"
    yield f"{text}."


def rows(advice: Advice) -> list[list[str]]:
    """Return the rows of the table, with a header."""
    head = ["", "algorithm", "options", "throughput (samples/s)", "speedup", "bottleneck"]
    head += ["sample efficiency", "effective throughput"] if advice.weighs else []
    table = [head]
    for rank, entry in enumerate(advice.entries, start=1):
        timed = entry.timed
        if timed is None:
            continue
        low, high = entry.between
        _, limit = classify(
            entry.candidate, timed, advice.ground, advice.request.options.batch_size
        )
        line = [
            str(rank),
            entry.candidate.algorithm,
            entry.candidate.settings,
            f"{number(entry.rate)} ({number(low, 3)} to {number(high, 3)})",
            f"{advice.speed_up(entry.rate):.1f}",
            limit,
        ]
        if advice.weighs:
            line += [_efficiency(entry.share), number(entry.score)]
        table.append(line)
    return table


def _efficiency(share: SampleEfficiency) -> str:
    """Return a sample efficiency, its range over the seeds, and a mark if it is an estimate."""
    text = f"{share.value:.2f}"
    if share.interval is not None:
        text += " ({:.2f} to {:.2f})".format(*share.interval)
    return text if share.is_sure else f"{text} ?"


def _notes(advice: Advice, most: int) -> Iterator[str]:
    known = [entry for entry in advice.entries if entry.timed is not None]
    yield (
        "The figures are from simulations. Brackets after the throughput: expected interval. "
        "Bottleneck: load of the busiest link, or share of the time that workers wait."
    )
    if advice.weighs:
        yield from _notes_on_efficiency(advice)
    if (part := advice.part) is not None:
        checked = [each.candidate.describe() for each in advice.entries if each.growth is not None]
        check = "no candidate, for lack of time; increase --seconds"
        yield (
            f"Most simulations had {part.workers} of the workers on {part.hosts} of the hosts, and "
            "the same share of the servers. Checked on the whole cluster: "
            f"{'; '.join(checked) or check}."
        )
    if len(known) > most:
        yield f"{len(known) - most} slower candidates are not shown."
    skipped = [entry for entry in advice.entries if entry.timed is None]
    for why in dict.fromkeys(entry.why_not for entry in skipped):
        names = [entry.candidate.describe() for entry in skipped if entry.why_not == why]
        yield f"Not run ({why}): {'; '.join(names)}."


def _notes_on_efficiency(advice: Advice) -> Iterator[str]:
    best = advice.best
    origin = (
        "measured with ResNet-20 on CIFAR-10, or with a small GPT over slow links. To measure it "
        "on your task, add --pilot STEPS"
    )
    if advice.request.options.pilot:
        origin = f"measured in {advice.request.options.pilot} steps on your model and data"
    yield (
        "Effective throughput is throughput times sample efficiency. Sample efficiency is relative "
        f"to synchronous SGD, {origin}. In brackets: its range over several seeds."
    )
    if best.share.source:
        yield f"Sample efficiency of {best.candidate.algorithm}: {best.share.source}."
    if any(entry.timed and not entry.share.is_sure for entry in advice.entries):
        yield (
            "A question mark denotes an estimate: measured with far fewer workers, not at all, or "
            "in short runs whose figure is capped."
        )


def _changes(advice: Advice) -> list[str]:
    lines = ["Effect of each change on the recommended candidate:", ""]
    for change, result, note in advice.tried:
        if result == NO_TIME:
            effect = "not simulated for lack of time; increase --seconds"
        elif isinstance(result, str):
            effect = f"cannot be simulated: {result}"
        else:
            effect = f"{throughput(result)} (factor {result / advice.best.rate:.2f})"
        lines.append(f"- {change.text}{f' ({note})' if note else ''}: {effect}")
    return ["\n".join(lines)] if advice.tried else []


def knee(points: Sequence[tuple[int, float, float]]) -> int | None:
    """Return the largest number of workers with most of the ideal speedup; None if none has."""
    return max((n for n, speed, ideal in points if speed >= EFFICIENT * ideal), default=None)


def _knees(advice: Advice) -> list[str]:
    lines = [f"Largest number of workers with {percent(EFFICIENT)} of the ideal speedup:", ""]
    for name, points in advice.scaling.items():
        most, end = max(n for n, *_ in points), knee(points)
        shown = "fewer than " + str(min(n for n, *_ in points)) if end is None else str(end)
        lines.append(f"- {name}: {shown}{' or more' if end == most else ''}")
    return ["\n".join(lines)] if advice.scaling else []


def _commands(advice: Advice) -> Iterator[str]:
    best, on, options = advice.best.candidate, advice.ground, advice.request.options
    place = "" if on.hosts == 1 else ", in an allocation of the hosts or with --hostfile FILE"
    yield f"With Open MPI{place}:"
    yield f"    {mpirun(best, on, options)}"
    if batch := sbatch(best, on, options):
        yield "With Slurm (`python -m aladdin_mpi.slurm init` writes slurm/):"
        yield f"    {batch}"
    if note := remark(options):
        yield note


# -- data ----------------------------------------------------------------------------------
def as_data(advice: Advice) -> dict[str, Any]:
    """Return the advice for JSON: SI units, bytes, shares from 0 to 1."""
    on, options = advice.ground, advice.request.options
    best = advice.best.candidate
    return {
        "cluster": advice.request.source,
        "workers": on.workers,
        "hosts": on.hosts,
        "model": options.model,
        "megabytes": on.megabytes,
        "step": on.step,
        "batch_size": options.batch_size,
        "target": options.target,
        "ideal_speed_up": on.ideal,
        "recommended": best.key,
        "mpirun": shlex.split(mpirun(best, on, options)),
        "sbatch": sbatch(best, on, options) or None,
        "bottleneck": {
            "kind": advice.bottleneck.kind,
            "text": advice.bottleneck.text,
            "relief": advice.bottleneck.change or None,
            "relieved_samples_per_second": advice.unblocked,
        },
        "what_if": [
            {"change": change.text, **_trial(result), "beside": note or None}
            for change, result, note in advice.tried
        ],
        "bytes_per_day_on_busiest_link": bytes_per_day(advice),
        "worker_memory_in_models": worker_models(best, on.node),
        "server_memory_in_models": _server_models(advice),
        "scaling": advice.scaling,
        "candidates": [_entry(advice, entry) for entry in advice.entries],
    }


def _trial(result: TrialResult) -> dict[str, Any]:
    if isinstance(result, str):
        return {"samples_per_second": None, "not_run": result}
    return {"samples_per_second": result}


def _entry(advice: Advice, entry: CandidateResult) -> dict[str, Any]:
    timed = entry.timed
    about: dict[str, Any] = {
        "options": entry.candidate.key,
        "servers": entry.candidate.servers,
        "spread": entry.candidate.spread,
        "bound_samples_per_second": entry.bound,
    }
    if timed is None:
        return {**about, "not_run": entry.why_not or NO_TIME}
    return {
        **about,
        "samples_per_second": entry.rate,
        "likely": entry.between,
        "runs": len(entry.long) or 1,
        "is_long": bool(entry.long),
        "whole_over_part": entry.growth,
        "speed_up": advice.speed_up(entry.rate),
        "waiting": timed.waiting,
        "busiest_link": vars(timed.links[0]) if timed.links else None,
        "busiest_link_bytes_per_step": timed.busiest_bytes,
        "a_sample_teaches": entry.share.value,
        "a_sample_teaches_interval": entry.share.interval,
        "by": entry.share.source or None,
        "is_sure": entry.share.is_sure,
        "counts": entry.score,
    }
