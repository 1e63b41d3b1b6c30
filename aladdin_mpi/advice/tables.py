"""Tables of measured figures, files of this package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_table(name: str) -> dict[str, dict[str, Any]]:
    """Return the sections of a file by name."""
    return tomllib.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))
