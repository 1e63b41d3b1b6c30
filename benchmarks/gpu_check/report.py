"""The report of a check: ``report.md`` for people and ``report.json`` for programs."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu_check.rows import FAIL, Row
from benchmarks.machine import Machine, describe_machine


class Report:
    """Rows in the order in which they arrive; both files are rewritten with every row."""

    def __init__(self, folder: Path, command: str, facts: Machine) -> None:
        self._folder = folder
        self._command = command
        self._facts = facts
        self.rows: list[Row] = []
        self._write()

    def add(self, row: Row) -> None:
        """Add a row, print it and write the files."""
        self.rows.append(row)
        print(f"{row.status}  {row.part}: {row.name}  {row.figures}  {row.note}".rstrip())
        self._write()

    @property
    def failed(self) -> bool:
        """Whether a row failed."""
        return any(row.status == FAIL for row in self.rows)

    def summary(self) -> str:
        """Return the number of rows by status."""
        counts = Counter(row.status for row in self.rows)
        return ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))

    def _write(self) -> None:
        result = {
            "command": self._command,
            "machine": dict(self._facts),
            "rows": [asdict(row) for row in self.rows],
        }
        _replace(self._folder / "report.json", json.dumps(result, indent=1) + "\n")
        _replace(self._folder / "report.md", self._markdown())

    def _markdown(self) -> str:
        cells = [
            [row.status, row.part, row.name, row.figures, row.note.replace("|", "\\|")]
            for row in self.rows
        ]
        lines = ["| status | part | check | figures | note |", "| --- | --- | --- | --- | --- |"]
        lines += [f"| {' | '.join(row)} |" for row in cells]
        table = "\n".join(lines)
        facts = describe_machine(self._facts)
        return (
            f"# GPU check\n\n{self.summary() or 'No rows yet'}\n\n{table}\n\n"
            f"    {self._command}\n\n```\n{facts}\n```\n"
        )


def _replace(path: Path, text: str) -> None:
    """Write a file atomically, so that readers never see a part of it."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
