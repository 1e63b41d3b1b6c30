"""The advice as a table, text, command lines and JSON."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aladdin_mpi.advice.bottleneck import Bottleneck
from aladdin_mpi.advice.candidate_search import CandidateResult
from aladdin_mpi.advice.candidates import REFERENCE, Candidate, ClusterTraits
from aladdin_mpi.advice.learning import SampleEfficiency
from aladdin_mpi.advice.options import AdviceRequest, AdviseOptions, Change
from aladdin_mpi.comparison.plots import COLOURS, MARKERS, save
from aladdin_mpi.process.console import number, percent, throughput

UNKNOWN = "/path/to"
STEPS = 100
"""Length of a timed run of a model that is known by its size alone."""


def mpirun(candidate: Candidate, on: ClusterTraits, options: AdviseOptions) -> str:
    """The command for Open MPI, in an allocation of the cluster's hosts.

    Ranks are mapped to the hosts in turn, so that each has its share of workers, and there may be
    more of them than slots, as servers come on top. Servers are the first ranks; unless they are
    spread over the hosts, ranks are numbered host by host.
    """
    numbering = [] if candidate.spread else ["--rank-by", "slot"]
    ranks = str(candidate.servers + on.workers)
    start = ["mpirun", "--map-by", "node:OVERSUBSCRIBE", *numbering, "-np", ranks]
    words = ["python", "-m", "aladdin_mpi.train", *_words(candidate, on, options)]
    return shlex.join([*start, *words])


def sbatch(candidate: Candidate, on: ClusterTraits, options: AdviseOptions) -> str:
    """The command for Slurm, with the package's script; empty if hosts have different workers."""
    each, *others = set(on.on_host)
    if others:
        return ""
    setting = "SPREAD_SERVERS=yes " if candidate.spread else ""
    resources = [f"--nodes={on.hosts}", f"--gpus-per-node={each}", f"--ntasks-per-node={each}"]
    words = ["sbatch", *resources, "slurm/train.sbatch", *_words(candidate, on, options)]
    return setting + shlex.join(words)


def remark(options: AdviseOptions) -> str:
    """What to know before pasting a command line; empty if nothing."""
    if _is_size(options):
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
    if _is_size(options):
        timed = ["--compute", "timed", "--compute-time", f"{on.step:g}", "--steps", str(STEPS)]
        return [*candidate.words, "--model", options.model, *batch, *timed]
    rate = [] if options.lr is None else ["--lr", f"{options.lr:g}"]
    return [*candidate.words, "--model", options.model, *_data(options), *batch, *rate]


def _is_size(options: AdviseOptions) -> bool:
    # Imported here because it takes a second to import torch.
    from aladdin_mpi.run.trainer import SIZE_PREFIX

    return options.model.startswith(SIZE_PREFIX)


def _data(options: AdviseOptions) -> list[str]:
    """The data set as training takes it: ``imagenet`` is known by its sizes alone."""
    from aladdin_mpi.data.builtin_sets import VISION_SETS

    folder = [] if options.data_dir is None else ["--data-dir", str(options.data_dir)]
    if options.dataset == "imagenet":
        return ["--dataset", "imagefolder", *(folder or ["--data-dir", f"{UNKNOWN}/imagenet"])]
    download = ["--download"] if options.dataset in VISION_SETS else []
    return ["--dataset", options.dataset, *folder, *download]


MOST = 14
"""Bars."""


def draw(advice: Advice, path: Path) -> None:
    """Write the picture to a PNG file."""
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
    axis.barh(places, speeds, xerr=errors, color=COLOURS[0], ecolor="grey", label="speed-up")
    if advice.weighs:
        counts = [advice.speed_up(entry.score) for entry in known]
        axis.plot(counts, places, "D", color=COLOURS[1], label="by what a sample teaches")
    axis.axvline(advice.ground.ideal, color="grey", linewidth=0.8, linestyle="--", label="ideal")
    axis.set_yticks(places, [entry.candidate.describe() for entry in known])
    axis.invert_yaxis()
    axis.set_xlabel(f"times one worker, {advice.ground.workers} workers")
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
    axis.set_ylabel("times one worker")
    axis.legend(fontsize="small")
    axis.grid(alpha=0.3)


GAIN = 1.05
"""From which a change is said to bring something."""
EFFICIENT = 0.8
"""Share of the ideal speed-up at which an algorithm has its knee."""
Tried = tuple[Change, float | None, str]
"""A change, samples per second with it (None: no time), and what else changes with it."""
Scaling = dict[str, list[tuple[int, float, float]]]
"""For each candidate: workers, speed-up, ideal."""


@dataclass(frozen=True)
class Advice:
    """The results of a search.

    Attributes:
        entries: the best first.
        relieved: samples per second of the best without its bottleneck.
        tried: the changes of ``--what-if``.
        scaling: speed-ups with other numbers of workers.
        part: of the cluster, on which most runs were; None: all were on the whole of it.
    """

    request: AdviceRequest
    ground: ClusterTraits
    entries: Sequence[CandidateResult]
    bottleneck: Bottleneck
    relieved: float | None
    tried: Sequence[Tried]
    scaling: Scaling = field(default_factory=dict)
    part: ClusterTraits | None = None

    @property
    def best(self) -> CandidateResult:
        """What is recommended."""
        return self.entries[0]

    def speed_up(self, rate: float) -> float:
        """Over one worker alone."""
        return rate * self.ground.step / self.request.options.batch_size

    @property
    def weighs(self) -> bool:
        """Whether what a sample teaches counts."""
        return self.request.options.target == "accuracy"


# -- in words ----------------------------------------------------------------------------
def in_words(advice: Advice, table: Callable[[Sequence[Sequence[str]]], str], most: int) -> str:
    """The whole advice as text; ``table`` renders rows, of which the first ``most`` are shown."""
    parts = [_summary(advice), table(rows(advice)[: most + 1]), " ".join(_notes(advice, most))]
    parts += [_bottleneck(advice), *_changes(advice), *_knees(advice), *_commands(advice)]
    return "\n\n".join(parts)


def _summary(advice: Advice) -> str:
    best, on = advice.best, advice.ground
    low, high = best.between
    gain = ""
    base = next((e for e in advice.entries if e.candidate == REFERENCE), None)
    if base is not None and base.timed is not None and base is not best:
        factor = best.score / base.score
        what = " to an accuracy" if advice.weighs else ""
        gain = f", {factor:.2f} times as fast{what} as ar-sgd"
        if not best.share.is_sure:
            gain += f" if its sample efficiency is {best.share.value:.2f}, which is a guess"
    return (
        f"{on.workers} workers on {on.hosts} host{'s' * (on.hosts > 1)}, "
        f"{advice.request.options.model} ({number(on.megabytes, 3)} MB), a step of "
        f"{number(on.step, 3)} s for {advice.request.options.batch_size} samples.\n"
        f"Recommended: {best.candidate.describe()}: {throughput(best.rate)} "
        f"({number(low, 3)} to {number(high, 3)}), {advice.speed_up(best.rate):.1f} times one "
        f"worker of {on.ideal:.1f} possible{gain}."
    )


def rows(advice: Advice) -> list[list[str]]:
    """The table."""
    head = ["", "", "samples/s", "likely", "speed-up", "waiting", "MB/step", "link"]
    head += ["sample efficiency", "counts"] if advice.weighs else []
    table = [head]
    for rank, entry in enumerate(advice.entries, start=1):
        timed = entry.timed
        if timed is None:
            continue
        low, high = entry.between
        line = [
            str(rank),
            entry.candidate.describe(),
            number(entry.rate),
            f"{number(low, 3)} to {number(high, 3)}",
            f"{advice.speed_up(entry.rate):.1f}",
            percent(timed.waiting),
            number(timed.busiest_bytes / 1e6, 3),
            percent(timed.links[0].used) if timed.links else "-",
        ]
        if advice.weighs:
            line += [_efficiency(entry.share), number(entry.score)]
        table.append(line)
    return table


def _efficiency(share: SampleEfficiency) -> str:
    """A sample efficiency, its range over the seeds, and a mark if it is a guess."""
    text = f"{share.value:.2f}"
    if share.interval is not None:
        text += " ({:.2f} to {:.2f})".format(*share.interval)
    return text if share.is_sure else f"{text} ?"


def _notes(advice: Advice, most: int) -> Iterator[str]:
    known = [entry for entry in advice.entries if entry.timed is not None]
    yield "MB/step: of the busiest link, for a step of all workers; link: how much of its time."
    if len(known) > most:
        yield f"{len(known) - most} more are slower."
    left = [entry for entry in advice.entries if entry.timed is None]
    for why in dict.fromkeys(entry.why_not for entry in left):
        those = [entry.candidate.describe() for entry in left if entry.why_not == why]
        yield f"Not run, {why}: {'; '.join(those)}."
    if (part := advice.part) is not None:
        yield (
            f"By runs with {part.workers} of the workers on {part.hosts} of the hosts, with their "
            "part of the servers where these can be divided;"
        )
        checked = [each.candidate.describe() for each in advice.entries if each.growth is not None]
        if checked:
            yield f"compared with all of them for {'; '.join(checked)}."
        else:
            yield "for all of them there was no time: give more --seconds."
    if advice.weighs:
        yield from _notes_on_efficiency(advice)


def _notes_on_efficiency(advice: Advice) -> Iterator[str]:
    best = advice.best
    how = (
        "measured in the package's own runs (ResNet-20 on CIFAR-10); it may differ on your task, "
        "on which --pilot STEPS measures it"
    )
    if advice.request.options.pilot:
        how = f"measured by a pilot of {advice.request.options.pilot} steps on your model and data"
    yield (
        f"Sample efficiency is relative to synchronous SGD, {how}. In brackets is its range over "
        "the seeds; without brackets it is exact or of one seed."
    )
    if best.share.source:
        guess = "" if best.share.is_sure else ", so take it as a guess"
        yield f"For {best.candidate.algorithm}: {best.share.source}{guess}."
    if any(entry.timed and not entry.share.is_sure for entry in advice.entries):
        yield (
            "A question mark means a guess: measured with far fewer workers, not at all, or in "
            "short runs whose figure is capped."
        )


def _bottleneck(advice: Advice) -> str:
    found, rate = advice.bottleneck, advice.best.rate
    text = f"What holds it up: {found.text}."
    if advice.relieved is not None:
        factor = advice.relieved / rate
        brings = f"{factor:.2f} times as many samples/s" if factor >= GAIN else "next to nothing"
        text += f" With {found.change} it would bring {brings}."
    return text


def _changes(advice: Advice) -> list[str]:
    lines = ["Each change by itself would bring, with what is recommended:"]
    for change, rate, note in advice.tried:
        brings = "no time to find out; give more --seconds"
        if rate is not None:
            brings = f"{throughput(rate)}, {rate / advice.best.rate:.2f} times as many"
        lines.append(f"    {change.text}{f' ({note})' if note else ''}: {brings}")
    return ["\n".join(lines)] if advice.tried else []


def knee(points: Sequence[tuple[int, float, float]]) -> int | None:
    """The largest number of workers with which an algorithm still has most of the ideal."""
    return max((n for n, found, ideal in points if found >= EFFICIENT * ideal), default=None)


def _knees(advice: Advice) -> list[str]:
    lines = [f"Workers up to which there is {percent(EFFICIENT)} of the ideal speed-up:"]
    for name, points in advice.scaling.items():
        most, end = max(n for n, *_ in points), knee(points)
        shown = "fewer than " + str(min(n for n, *_ in points)) if end is None else str(end)
        lines.append(f"    {name}: {shown}{' and more' if end == most else ''}")
    return ["\n".join(lines)] if advice.scaling else []


def _commands(advice: Advice) -> Iterator[str]:
    found, on, options = advice.best.candidate, advice.ground, advice.request.options
    place = "" if on.hosts == 1 else ", in an allocation of the hosts or with --hostfile FILE"
    yield f"Run it with Open MPI{place}:"
    yield f"    {mpirun(found, on, options)}"
    if batch := sbatch(found, on, options):
        yield "or on Slurm (`python -m aladdin_mpi.slurm init` writes slurm/):"
        yield f"    {batch}"
    if note := remark(options):
        yield note


# -- for programs --------------------------------------------------------------------------
def as_data(advice: Advice) -> dict[str, Any]:
    """The same for JSON: SI units, bytes, shares from 0 to 1."""
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
            "relieved_samples_per_second": advice.relieved,
        },
        "what_if": [
            {"change": change.text, "samples_per_second": rate, "beside": note or None}
            for change, rate, note in advice.tried
        ],
        "scaling": advice.scaling,
        "candidates": [_entry(advice, entry) for entry in advice.entries],
    }


def _entry(advice: Advice, entry: CandidateResult) -> dict[str, Any]:
    timed = entry.timed
    about: dict[str, Any] = {
        "options": entry.candidate.key,
        "servers": entry.candidate.servers,
        "spread": entry.candidate.spread,
        "bound_samples_per_second": entry.bound,
    }
    if timed is None:
        return {**about, "not_run": entry.why_not or "no time"}
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
