"""Files to which programs that may be killed append finished runs line by line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def whole_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Return the lines with their numbers, from 1; remove a last one that was cut off."""
    whole, _, cut = path.read_text(encoding="utf-8").rpartition("\n")
    yield from enumerate(whole.splitlines(), start=1)
    if cut:
        path.write_text(f"{whole}\n" if whole else "", encoding="utf-8")
