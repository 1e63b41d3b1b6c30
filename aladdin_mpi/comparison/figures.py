"""Figures of finished runs, with mean and spread over seeds."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aladdin_mpi.errors import UserError
from aladdin_mpi.hooks.recorder import read_metrics, rounded
from aladdin_mpi.options.run import SUMMARY
from aladdin_mpi.process import console, files

HEADINGS = {
    "test_accuracy": "accuracy",
    "test_loss": "loss",
    "seconds": "time (s)",
    "seconds_to_target": "time to {} (s)",
    "samples_per_second": "throughput (samples/s)",
    "speed_up": "speedup",
    "wait_fraction": "waiting (%)",
    "bytes_sent_per_step": "bytes/step",
    "coalesced_fraction": "coalesced (%)",
}
"""Headings of the compared figures, in the order of the table."""
KEYS = tuple(HEADINGS)
DECIMALS = {"test_accuracy": 4, "test_loss": 4, "speed_up": 2, "bytes_sent_per_step": 0}
"""Decimals of figures that are not shown with four digits, or as percentages with three."""


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of the global model during a run; None for figures that were not measured."""

    samples: int
    seconds: float
    accuracy: float | None = None
    loss: float | None = None
    model_variance: float | None = None
    """The variance among the workers' models."""


@dataclass(frozen=True)
class Measure:
    """A figure of evaluations by which models are compared.

    Args:
        key: its name in summaries and metrics.
        name: its name for users, and in `Evaluation`.
        sign: 1 if larger values are better, -1 otherwise.
    """

    key: str
    name: str
    sign: int

    def of(self, evaluation: Evaluation) -> float | None:
        """Return its value."""
        value: float | None = getattr(evaluation, self.name)
        return value


ACCURACY = Measure("test_accuracy", "accuracy", 1)
LOSS = Measure("test_loss", "loss", -1)
MEASURES = (ACCURACY, LOSS)
"""All measures; the first one that a comparison has is used."""


@dataclass(frozen=True)
class Target:
    """A value of a measure that runs should reach."""

    measure: Measure
    value: float

    def is_reached(self, evaluation: Evaluation) -> bool:
        """Whether an evaluation is at least as good."""
        sign, value = self.measure.sign, self.measure.of(evaluation)
        return value is not None and sign * value >= sign * self.value

    def __str__(self) -> str:
        return f"{self.value:g}" if self.measure is ACCURACY else f"loss {self.value:g}"


@dataclass(frozen=True)
class RunFigures:
    """The results of a finished run."""

    label: str
    folder: Path
    summary: Mapping[str, Any]
    evaluations: Sequence[Evaluation] = field(repr=False)

    def value(self, key: str) -> float | None:
        """Return a figure of the summary; None if it is missing or not finite."""
        value = self.summary.get(key)
        return float(value) if value is not None and math.isfinite(value) else None

    def seconds_to(self, target: Target) -> float | None:
        """Return the training time to the first evaluation that reaches the target, or None."""
        return next((e.seconds for e in self.evaluations if target.is_reached(e)), None)

    @property
    def coalesced_fraction(self) -> float | None:
        """The share of gradients that were added to another before they were sent."""
        coalesced, computed = self.value("gradients_coalesced"), self.value("gradients_computed")
        return None if coalesced is None or not computed else coalesced / computed

    def all_values(self, target: Target | None, baseline: float | None) -> dict[str, float | None]:
        """Return the figures of ``KEYS``."""
        values = {key: self.value(key) for key in KEYS}
        values["coalesced_fraction"] = self.coalesced_fraction
        throughput = self.value("samples_per_second")
        if target is not None:
            values["seconds_to_target"] = self.seconds_to(target)
        if baseline is not None and throughput is not None:
            values["speed_up"] = throughput / baseline
        return {key: rounded(value, key) for key, value in values.items()}

    def __str__(self) -> str:
        values = [(measure.name, self.value(measure.key)) for measure in MEASURES]
        parts = [f"{name} {value:.4f}" for name, value in values if value is not None][:1]
        seconds = self.value("seconds")
        parts += [f"training time {console.number(seconds)} s"] if seconds is not None else []
        return ", ".join([*parts, console.throughput(self.value("samples_per_second") or 0.0)])


def read_figures(folder: Path, label: str) -> RunFigures:
    """Return the figures in a run folder.

    Raises:
        UserError: its files cannot be read.
    """
    try:
        summary = files.read((folder / SUMMARY).read_text(encoding="utf-8"))
        lines = [line for line in read_metrics(folder) if line["kind"] == "eval"]
        evaluations = [
            Evaluation(
                line["samples"],
                line["seconds"],
                line.get(ACCURACY.key),
                line.get(LOSS.key),
                line.get("model_variance"),
            )
            for line in lines
            if any(line.get(measure.key) is not None for measure in MEASURES)
        ]
        if not {"algorithm", "seed"} <= summary.keys():
            raise KeyError("algorithm, seed")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{folder}: expected the folder of a finished run, but its {SUMMARY} or metrics "
            f"cannot be read ({error!r}); remove it, or run it again"
        ) from error
    return RunFigures(label, folder, summary, sorted(evaluations, key=lambda e: e.samples))


# -- over seeds ---------------------------------------------------------------------------
@dataclass(frozen=True)
class Spread:
    """A figure over several runs."""

    mean: float
    std: float | None
    """Sample standard deviation (divided by n - 1); None for a single run."""
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class TableRow:
    """A row of the table, with the figures of `KEYS`, but of only one measure."""

    label: str
    algorithm: str
    runs: int
    figures: Mapping[str, Spread | None]

    def mean(self, key: str) -> float | None:
        """Return the mean of a figure; None if it is missing."""
        spread = self.figures[key]
        return None if spread is None else spread.mean

    def has(self, key: str) -> bool:
        """Return whether to show a figure; coalesced gradients only if there were any."""
        spread = self.figures.get(key)
        return spread is not None and (key != "coalesced_fraction" or spread.high > 0)


def spread(values: Iterable[float | None]) -> Spread | None:
    """Return mean and spread of the known values, rounded; None without any."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    mean = rounded(statistics.fmean(known))
    std = rounded(statistics.stdev(known)) if len(known) > 1 else None
    return Spread(mean, std, min(known), max(known), len(known))


def compared_measure(runs: Sequence[RunFigures], target: Target | None) -> Measure:
    """Return the first measure that any run has: the target's, or else one of `MEASURES`."""
    measures = [*([] if target is None else [target.measure]), *MEASURES]
    known = (m for m in measures if any(run.value(m.key) is not None for run in runs))
    return next(known, measures[0])


def make_rows(
    runs: Sequence[RunFigures], target: Target | None, baseline: float | None
) -> list[TableRow]:
    """Return a row for each label, the best first, those that are equal by ascending time."""
    measure = compared_measure(runs, target)
    others = {each.key for each in MEASURES} - {measure.key}
    rows = []
    for label in dict.fromkeys(run.label for run in runs):
        same = [run for run in runs if run.label == label]
        values = [run.all_values(target, baseline) for run in same]
        figures = {key: spread(v[key] for v in values) for key in KEYS if key not in others}
        rows.append(TableRow(label, str(same[0].summary["algorithm"]), len(same), figures))

    def rank(row: TableRow) -> tuple[float, float]:
        value, seconds = row.mean(measure.key), row.mean("seconds")
        return (
            math.inf if value is None else -measure.sign * value,
            math.inf if seconds is None else seconds,
        )

    return sorted(rows, key=rank)


def four_digits(value: float) -> int:
    """Return the number of decimals for four significant digits; 0 for large numbers."""
    return max(0, 3 - math.floor(math.log10(abs(value)))) if value else 0


def keys_shown(rows: Sequence[TableRow]) -> list[str]:
    """Return those of ``KEYS`` for which any row has a value."""
    return [key for key in KEYS if any(row.has(key) for row in rows)]


def make_cells(rows: Sequence[TableRow], target: Target | None, sign: str) -> list[list[str]]:
    """Return cells with headings, without empty columns; ``sign`` precedes standard deviations."""
    keys = keys_shown(rows)
    headings = [HEADINGS[key].format(target) for key in keys]
    table = [["", "algorithm", "runs", *headings]]
    for rank, row in enumerate(rows, start=1):
        values = [_cell(row.figures[key], key, row.runs, sign) for key in keys]
        table.append([str(rank), row.label, str(row.runs), *values])
    return table


def _cell(figure: Spread | None, key: str, runs: int, sign: str) -> str:
    if figure is None:
        return "never" if key == "seconds_to_target" else "-"
    scale = 100.0 if HEADINGS[key].endswith("(%)") else 1.0
    mean = figure.mean * scale
    decimals = DECIMALS[key] if key in DECIMALS else four_digits(mean)
    if scale != 1.0:  # shares below 0.0001 % are shown as 0
        decimals = min(4, max(0, decimals - 1))
    text = f"{mean:,.{decimals}f}"
    if figure.std is not None:
        text += f" {sign} {figure.std * scale:,.{decimals}f}"
    return text if figure.n == runs else f"{text} ({figure.n} of {runs})"


def plain(table: Sequence[Sequence[str]], left: Collection[int] = (1,)) -> str:
    """Return a plain-text table: columns ``left`` aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    )


def markdown(table: Sequence[Sequence[str]], left: Collection[int] = (1,)) -> str:
    """Return a Markdown table: columns ``left`` aligned left, the others right."""
    rule = ["---" if place in left else "---:" for place in range(len(table[0]))]
    lines = [table[0], rule, *table[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def as_csv(rows: Sequence[TableRow]) -> str:
    """Return the table as CSV: SI units, fractions from 0 to 1, empty fields without a value."""
    shown, parts = keys_shown(rows), ("mean", "std", "low", "high", "n")
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    names = [f"{key}_{part}" for key in shown for part in parts]
    writer.writerow(["rank", "label", "algorithm", "runs", *names])
    for rank, row in enumerate(rows, start=1):
        figures = [row.figures[key] for key in shown]
        values = [getattr(each, part, None) for each in figures for part in parts]
        writer.writerow([rank, row.label, row.algorithm, row.runs, *values])
    return stream.getvalue()
