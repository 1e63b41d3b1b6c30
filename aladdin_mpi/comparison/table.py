"""The table of a comparison: for the terminal, for Markdown, and for programs."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aladdin_mpi.comparison.figures import Row, Spread


@dataclass(frozen=True)
class Column:
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


def columns(target: float | None) -> list[Column]:
    """All columns, with the accuracy that times were measured to."""
    return [
        Column("test_accuracy", "accuracy", decimals=lambda value: 4),
        Column("seconds", "time, s"),
        Column("seconds_to_target", f"time to {target or 0:g}, s"),
        Column("samples_per_second", "samples/s"),
        Column("speed_up", "speed-up", decimals=lambda value: 2),
        Column("wait_fraction", "waiting, %", scale=100.0, decimals=_three_digits),
        Column("bytes_sent_per_step", "bytes/step", decimals=lambda value: 0),
        Column("coalesced_fraction", "coalesced, %", scale=100.0, decimals=_three_digits),
    ]


def cells(rows: Sequence[Row], target: float | None, sign: str) -> list[list[str]]:
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


def _cell(found: Spread | None, column: Column, runs: int, sign: str) -> str:
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


def as_csv(rows: Sequence[Row]) -> str:
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
