"""Why speed-ups in virtual time differ from those of the IPDPS 2021 study."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

QUARTER = 0.25
"""A larger relative difference must have a reason."""

NOTES = ""


def is_near(found: float | None, published: float) -> bool:
    """Whether a speed-up is within a quarter of the published one."""
    return found is not None and abs(found / published - 1) <= QUARTER


def reason(row: Mapping[str, Any]) -> str:
    """Stub."""
    return ""


def unexplained(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Stub."""
    return []
