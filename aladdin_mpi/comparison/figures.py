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
    "seconds": "time (s)",
    "seconds_to_target": "time to {:g} (s)",
    "samples_per_second": "throughput (samples/s)",
    "speed_up": "speedup",
    "wait_fraction": "waiting (%)",
    "bytes_sent_per_step": "bytes/step",
    "coalesced_fraction": "coalesced (%)",
}
"""Headings of the compared figures, in the order of the table."""
KEYS = tuple(HEADINGS)
DECIMALS = {"test_accuracy": 4, "speed_up": 2, "bytes_sent_per_step": 0}
"""Decimals of figures that are not shown with four digits, or as percentages with three."""


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of the global model during a run."""

    samples: int
    seconds: float
    accuracy: float
    model_variance: float | None = None
    """The variance among the workers' models; None if it was not measured."""


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

    def seconds_to(self, target: float) -> float | None:
        """Return the training time to the first evaluation at or above this accuracy, or None."""
        return next((e.seconds for e in self.evaluations if e.accuracy >= target), None)

    @property
    def coalesced_fraction(self) -> float | None:
        """The share of gradients that were added to another before they were sent."""
        coalesced, computed = self.value("gradients_coalesced"), self.value("gradients_computed")
        return None if coalesced is None or not computed else coalesced / computed

    def all_values(self, target: float | None, baseline: float | None) -> dict[str, float | None]:
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
        accuracy, seconds = self.value("test_accuracy"), self.value("seconds")
        parts = [] if accuracy is None else [f"accuracy {accuracy:.4f}"]
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
            Evaluation(line["samples"], line["seconds"], accuracy, line.get("model_variance"))
            for line in lines
            if (accuracy := line.get("test_accuracy")) is not None
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
    """A row of the table."""

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
        spread = self.figures[key]
        return spread is not None and (key != "coalesced_fraction" or spread.high > 0)


def spread(values: Iterable[float | None]) -> Spread | None:
    """Return mean and spread of the known values, rounded; None without any."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    mean = rounded(statistics.fmean(known))
    std = rounded(statistics.stdev(known)) if len(known) > 1 else None
    return Spread(mean, std, min(known), max(known), len(known))


def make_rows(
    runs: Sequence[RunFigures], target: float | None, baseline: float | None
) -> list[TableRow]:
    """Return a row for each label, sorted by descending accuracy, then by ascending time."""
    rows = []
    for label in dict.fromkeys(run.label for run in runs):
        same = [run for run in runs if run.label == label]
        values = [run.all_values(target, baseline) for run in same]
        figures = {key: spread(each[key] for each in values) for key in KEYS}
        rows.append(TableRow(label, str(same[0].summary["algorithm"]), len(same), figures))

    def rank(row: TableRow) -> tuple[float, float]:
        accuracy, seconds = row.mean("test_accuracy"), row.mean("seconds")
        return (
            math.inf if accuracy is None else -accuracy,
            math.inf if seconds is None else seconds,
        )

    return sorted(rows, key=rank)


def four_digits(value: float) -> int:
    """Return the number of decimals for four significant digits; 0 for large numbers."""
    return max(0, 3 - math.floor(math.log10(abs(value)))) if value else 0


def keys_shown(rows: Sequence[TableRow]) -> list[str]:
    """Return those of ``KEYS`` for which any row has a value."""
    return [key for key in KEYS if any(row.has(key) for row in rows)]


def make_cells(rows: Sequence[TableRow], target: float | None, sign: str) -> list[list[str]]:
    """Return cells with headings, without empty columns; ``sign`` precedes standard deviations."""
    keys = keys_shown(rows)
    headings = [HEADINGS[key].format(target or 0) for key in keys]
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
