"""Results as files: NAME.json for programs and NAME.md for people."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aladdin_mpi.errors import UserError
from benchmarks.machine import Machine, machine

RESULTS = Path(__file__).resolve().parent / "results"


def write_result(
    name: str,
    title: str,
    rows: Sequence[Mapping[str, Any]],
    command: str | Sequence[str],
    notes: str = "",
    facts: Machine | None = None,
    folder: Path = RESULTS,
) -> tuple[Path, Path]:
    """Write NAME.json and NAME.md, each with the machine, the command and the date.

    Args:
        name: the files' name: lower-case letters, digits, hyphens and underscores.
        title: the heading.
        rows: the table; the keys are the columns, in the order of first appearance, and should
            name the unit. JSON keeps the full values, Markdown four digits.
        command: the command that produces these results, as text or as arguments.
        notes: definitions that a reader needs, in Markdown.
        facts: the result of `machine()` at the start of the run; by default, that of now.
        folder: the folder of the files.

    Returns:
        The paths of the JSON file and the Markdown file.

    Raises:
        UserError: the name has other characters, or the table is empty.
    """
    try:
        result_name(name)
    except ArgumentTypeError as error:
        raise UserError(f"name: {error}") from error
    if not rows:
        raise UserError("rows: expected at least one row, got none; nothing has been measured")
    result = {
        "name": name,
        "title": title,
        "command": command if isinstance(command, str) else _shell_line(command),
        "machine": machine() if facts is None else facts,
        "notes": notes,
        "rows": [{key: _plain(value) for key, value in row.items()} for row in rows],
    }
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / f"{name}.json", folder / f"{name}.md"
    # Serialise first: an invalid value must not destroy the older result.
    text = json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False)
    paths[0].write_text(text + "\n", encoding="utf-8")
    paths[1].write_text(_markdown(result), encoding="utf-8")
    return paths


def result_name(text: str) -> str:
    """Parse an option's value: the name of a table's files."""
    if not re.fullmatch(r"[a-z0-9]+([-_][a-z0-9]+)*", text):
        raise ArgumentTypeError(
            f"expected lower-case letters, digits, hyphens and underscores, got {text!r}"
        )
    return text


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a Markdown table; a missing key gives an empty cell."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[_cell(row.get(column)) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _markdown(result: Mapping[str, Any]) -> str:
    facts = [f"- {key}: {value}" for key, value in result["machine"].items() if value is not None]
    parts = [f"# {result['title']}", table(result["rows"]), result["notes"]]
    parts += [f"Command:\n\n    {result['command']}", "Machine:\n\n" + "\n".join(facts)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _plain(value: Any) -> Any:
    """Return the value, or its name if JSON has no number for it: nan, inf and -inf."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 10_000 else f"{value:.0f}"
    return str(value).replace("|", "\\|")


def _shell_line(command: Sequence[str]) -> str:
    """Return arguments as a shell line in which this Python is called `python`."""
    return shlex.join("python" if word == sys.executable else word for word in command)
