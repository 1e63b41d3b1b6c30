"""A store of finished runs, so that a long benchmark can be stopped at any time."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

from aladdin_mpi.errors import UserError
from benchmarks.kept_lines import whole_lines

FILE = "cells.jsonl"


class Keyed(Protocol):
    """A cell, or a run."""

    @property
    def key(self) -> str:
        """Return a text that identifies it."""


class CellStore:
    """Lines of JSON in a folder, one for each finished run; the last line of a cell counts.

    Args:
        folder: the folder of the file; None: nothing is kept.

    Raises:
        UserError: a line cannot be read, except a last one that was cut off.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / FILE
        self._lines: dict[str, dict[str, Any]] = {}
        if self._path is not None and self._path.exists():
            self._load(self._path)

    def _load(self, path: Path) -> None:
        for number, line in whole_lines(path):
            try:
                entry = json.loads(line)
                self._lines[entry["cell"]] = entry
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{path}, line {number}: expected a finished cell as JSON, got {line[:60]!r}; "
                    "remove the line to run the cell again"
                ) from error

    def get(self, cell: Keyed) -> dict[str, Any] | None:
        """Return a cell's entry with ``figures``, ``date`` and ``commit`` of the run, or None."""
        return self._lines.get(cell.key)

    def put(self, cell: Keyed, figures: Mapping[str, Any], commit: object) -> None:
        """Store the figures of a finished run of the program at ``commit``."""
        date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        entry = {"cell": cell.key, "figures": dict(figures), "date": date, "commit": commit}
        self._lines[cell.key] = entry
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())
