"""Finished run folders that some other command has made, put side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aladdin_mpi.comparison.figures import RunFigures, read_figures
from aladdin_mpi.comparison.plan import comparable, stored_options
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.resume import SUMMARY, differences
from aladdin_mpi.options.run import CONFIG_NAME, RunOptions, SimulateOptions, TrainOptions

EQUAL = ("engine", "workers", "model", "dataset", "samples", "version")
"""Facts of the summary that a comparison expects to be the same everywhere."""
BESIDE = ("checkpoint_every", "eval_every", "log_every", "data_dir", "seed", "algorithm")
"""Options that do not tell two rows of the table apart."""


@dataclass(frozen=True)
class ReadRun:
    """A run folder's figures and options."""

    figures: RunFigures
    options: RunOptions


def read_runs(folders: Sequence[Path]) -> list[ReadRun]:
    """The runs in these folders; those that differ in nothing but the seed share a label.

    Raises:
        UserError: one of them holds no finished run, or is named twice.
    """
    places = [folder.resolve() for folder in folders]
    for folder, place in zip(folders, places, strict=True):
        if places.count(place) > 1:
            raise UserError(
                f"--read: expected different folders, got {folder} twice; leave one out"
            )
        missing = [name for name in (CONFIG_NAME, SUMMARY) if not (folder / name).is_file()]
        if missing:
            raise UserError(
                f"--read: expected the folder of a finished run, got {str(folder)!r}, which has "
                f"no {' and no '.join(missing)}; name others, or end the run with --resume first"
            )
    found = [_read(folder) for folder in folders]
    labels = _labels([_facts(run) for run in found])
    return [
        ReadRun(read_figures(run.figures.folder, label), run.options)
        for run, label in zip(found, labels, strict=True)
    ]


def _read(folder: Path) -> ReadRun:
    figures = read_figures(folder, "")
    model = SimulateOptions if figures.summary.get("engine") == "virtual" else TrainOptions
    return ReadRun(figures, stored_options(folder, model))


def _facts(run: ReadRun) -> dict[str, Any]:
    """What a row of the table has in common: its options, and its number of workers."""
    facts = {name: v for name, v in comparable(run.options).items() if name not in BESIDE}
    about = {name: run.figures.summary.get(name) for name in ("algorithm", "engine", "workers")}
    return facts | about


def _labels(facts: Sequence[dict[str, Any]]) -> list[str]:
    """The algorithm's name and, where it occurs with several options, those that differ."""
    labels = []
    for own in facts:
        others = [other for other in facts if other["algorithm"] == own["algorithm"]]
        # A line reads "aladdin.pi: 4 and 2"; the first value is its own.
        lines = [line for other in others for line in differences(own, other)]
        told = dict.fromkeys(line.split(" and ")[0].replace(": ", " ") for line in lines)
        parts = [part for part in told if not part.endswith(" absent")]
        name = own["algorithm"]
        labels.append(", ".join([name, *(part.removeprefix(f"{name}.") for part in parts)]))
    return labels


def unequal(runs: Sequence[RunFigures]) -> list[str]:
    """A note for each fact that a fair comparison wants equal and that is not."""
    notes = []
    for name in EQUAL:
        values = {json.dumps(run.summary.get(name)) for run in runs}
        if len(values) > 1:
            notes.append(f"The runs are not equal in {name}: {', '.join(sorted(values))}.")
    seeds = {label: sorted(_seeds(runs, label)) for label in {run.label for run in runs}}
    if len({tuple(each) for each in seeds.values()}) > 1:
        text = "; ".join(f"{label}: {', '.join(map(str, each))}" for label, each in seeds.items())
        notes.append(f"Not all have the same seeds: {text}.")
    return notes


def _seeds(runs: Sequence[RunFigures], label: str) -> list[int]:
    return [run.summary["seed"] for run in runs if run.label == label]
