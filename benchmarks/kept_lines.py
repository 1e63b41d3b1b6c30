"""Files to which finished runs are added line by line, by programs that may be killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def whole_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines with their numbers, from 1; a last one that was cut off is taken away."""
    whole, _, cut = path.read_text(encoding="utf-8").rpartition("\n")
    yield from enumerate(whole.splitlines(), start=1)
    if cut:
        path.write_text(f"{whole}\n" if whole else "", encoding="utf-8")
