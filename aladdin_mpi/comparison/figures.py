"""The figures of finished runs, and their means and spreads over seeds."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.run import SUMMARY
from aladdin_mpi.process import console, files
from aladdin_mpi.run.recorder import read_metrics, rounded

KEYS = (
    "test_accuracy",
    "seconds",
    "seconds_to_target",
    "samples_per_second",
    "speed_up",
    "wait_fraction",
    "bytes_sent_per_step",
    "coalesced_fraction",
)
"""What is compared, in the order of the table."""

SHOWN_ABOVE_ZERO = frozenset({"coalesced_fraction"})
"""Of these there is a column only where some run has more than 0."""


@dataclass(frozen=True)
class Evaluation:
    """A measurement of the global model while a run went on."""

    samples: int
    seconds: float
    accuracy: float
    model_variance: float | None = None
    """Among the workers; None where it was not measured."""


@dataclass(frozen=True)
class RunFigures:
    """What a finished run has left."""

    label: str
    folder: Path
    summary: Mapping[str, Any]
    evaluations: Sequence[Evaluation] = field(repr=False)

    def value(self, key: str) -> float | None:
        """A figure of its summary; None where there is none, or none that is finite."""
        found = self.summary.get(key)
        return float(found) if found is not None and math.isfinite(found) else None

    def seconds_to(self, target: float) -> float | None:
        """Training time until the first evaluation with this accuracy or more."""
        return next((e.seconds for e in self.evaluations if e.accuracy >= target), None)

    @property
    def coalesced_fraction(self) -> float | None:
        """Share of the gradients that were added to another before they were sent."""
        coalesced, computed = self.value("gradients_coalesced"), self.value("gradients_computed")
        return None if coalesced is None or not computed else coalesced / computed

    def all_values(self, target: float | None, baseline: float | None) -> dict[str, float | None]:
        """Every figure of ``KEYS``."""
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
        parts += [f"{console.number(seconds)} s training time"] if seconds is not None else []
        return ", ".join([*parts, console.throughput(self.value("samples_per_second") or 0.0)])


def read_figures(folder: Path, label: str) -> RunFigures:
    """Read a run folder.

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
                line["test_accuracy"],
                line.get("model_variance"),
            )
            for line in lines
            if line.get("test_accuracy") is not None
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
    """Sample standard deviation (divided by n - 1); None of a single run."""
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class TableRow:
    """A line of the table."""

    label: str
    algorithm: str
    runs: int
    figures: Mapping[str, Spread | None]

    def mean(self, key: str) -> float | None:
        """The mean of a figure, if there is one."""
        spread = self.figures[key]
        return None if spread is None else spread.mean

    def has(self, key: str) -> bool:
        """Whether there is a figure to show: a share of coalesced gradients only if any were."""
        spread = self.figures[key]
        return spread is not None and (key not in SHOWN_ABOVE_ZERO or spread.high > 0)


def spread(values: Iterable[float | None]) -> Spread | None:
    """Mean and spread of the values that are there, rounded; None without any."""
    found = [value for value in values if value is not None]
    if not found:
        return None
    mean = rounded(statistics.fmean(found))
    std = rounded(statistics.stdev(found)) if len(found) > 1 else None
    return Spread(mean, std, min(found), max(found), len(found))


def make_rows(
    runs: Sequence[RunFigures], target: float | None, baseline: float | None
) -> list[TableRow]:
    """A row for each label: the highest accuracy first, of equal ones the shortest time."""
    rows = []
    for label in dict.fromkeys(run.label for run in runs):
        same = [run for run in runs if run.label == label]
        values = [run.all_values(target, baseline) for run in same]
        figures = {key: spread(each[key] for each in values) for key in KEYS}
        rows.append(TableRow(label, str(same[0].summary["algorithm"]), len(same), figures))
    return sorted(rows, key=_rank)


def _rank(row: TableRow) -> tuple[float, float]:
    accuracy, seconds = row.mean("test_accuracy"), row.mean("seconds")
    last = math.inf
    return last if accuracy is None else -accuracy, last if seconds is None else seconds


@dataclass(frozen=True)
class TableColumn:
    """A column: its key, its heading, and how a value is shown."""

    key: str
    heading: str
    scale: float = 1.0
    decimals: Callable[[float], int] | None = None


def four_digits(value: float) -> int:
    """Decimals that leave a number of four digits; none for large ones."""
    return max(0, 3 - math.floor(math.log10(abs(value)))) if value else 0


def _three_digits(value: float) -> int:
    """Decimals for a percentage: of a share below 0.0001 % nothing is left."""
    return min(4, max(0, four_digits(value) - 1))


def columns(target: float | None) -> list[TableColumn]:
    """All columns, with the accuracy that times were measured to."""
    return [
        TableColumn("test_accuracy", "accuracy", decimals=lambda value: 4),
        TableColumn("seconds", "time, s"),
        TableColumn("seconds_to_target", f"time to {target or 0:g}, s"),
        TableColumn("samples_per_second", "samples/s"),
        TableColumn("speed_up", "speed-up", decimals=lambda value: 2),
        TableColumn("wait_fraction", "waiting, %", scale=100.0, decimals=_three_digits),
        TableColumn("bytes_sent_per_step", "bytes/step", decimals=lambda value: 0),
        TableColumn("coalesced_fraction", "coalesced, %", scale=100.0, decimals=_three_digits),
    ]


def cells(rows: Sequence[TableRow], target: float | None, sign: str) -> list[list[str]]:
    """Headings and lines; columns without any value are left out.

    Args:
        rows: in their order.
        target: the accuracy that times were measured to.
        sign: what stands between mean and standard deviation.
    """
    shown = [c for c in columns(target) if any(row.has(c.key) for row in rows)]
    table = [["", "algorithm", "runs", *(column.heading for column in shown)]]
    for rank, row in enumerate(rows, start=1):
        values = [_cell(row.figures[column.key], column, row.runs, sign) for column in shown]
        table.append([str(rank), row.label, str(row.runs), *values])
    return table


def _cell(found: Spread | None, column: TableColumn, runs: int, sign: str) -> str:
    if found is None:
        return "never" if column.key == "seconds_to_target" else "-"
    mean = found.mean * column.scale
    decimals = (column.decimals or four_digits)(mean)
    text = f"{mean:,.{decimals}f}"
    if found.std is not None:
        text += f" {sign} {found.std * column.scale:,.{decimals}f}"
    return text if found.n == runs else f"{text} ({found.n} of {runs})"


def plain(table: Sequence[Sequence[str]]) -> str:
    """Lines of a terminal: names to the left, figures to the right."""
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 1 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    )


def markdown(table: Sequence[Sequence[str]]) -> str:
    """The same for Markdown."""
    lines = [table[0], ["---:", "---", *["---:"] * (len(table[0]) - 2)], *table[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def as_csv(rows: Sequence[TableRow]) -> str:
    """For programs: SI units, fractions from 0 to 1; an empty field where there is no value."""
    shown = [c.key for c in columns(None) if any(row.has(c.key) for row in rows)]
    parts = ("mean", "std", "low", "high", "n")
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(
        [
            "rank",
            "label",
            "algorithm",
            "runs",
            *(f"{key}_{part}" for key in shown for part in parts),
        ]
    )
    for rank, row in enumerate(rows, start=1):
        found = [row.figures[key] for key in shown]
        values = [getattr(each, part, None) for each in found for part in parts]
        writer.writerow([rank, row.label, row.algorithm, row.runs, *values])
    return stream.getvalue()
