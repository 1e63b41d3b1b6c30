"""Rows of the report, and their text form in the output of a part's programs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

MARK = "gpu-check row: "
"""Prefix of the lines of a part's output that are rows."""
PASS, FAIL, SKIP = "PASS", "FAIL", "SKIP"


@dataclass(frozen=True)
class Row:
    """One line of the report.

    Args:
        part: the part of the check, such as "equality".
        name: the property that was checked.
        status: ``PASS``, ``FAIL`` or ``SKIP``.
        figures: measured values with units.
        note: the reason for a failure or an omission.
    """

    part: str
    name: str
    status: str
    figures: str = ""
    note: str = ""


def report(part: str, name: str, passed: bool, figures: str = "", note: str = "") -> None:
    """Print a row for the parent process; called on one rank."""
    print_row(Row(part, name, PASS if passed else FAIL, figures, note))


def print_row(row: Row) -> None:
    """Print ``row`` in the form that :func:`parse` reads."""
    print(MARK + json.dumps(asdict(row)), flush=True)


def parse(line: str) -> Row | None:
    """Return the row in a line of output; None for other output."""
    if not line.startswith(MARK):
        return None
    return Row(**json.loads(line.removeprefix(MARK)))
