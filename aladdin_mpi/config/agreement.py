"""What all ranks of a run must agree on, its fingerprint, and where two sides differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from aladdin_mpi.config.fields import dotted

LOCAL_FIELDS = frozenset(
    {
        "bind_cores",
        "cache",
        "data_dir",
        "device",
        "download",
        "loader_start_method",
        "loader_workers",
        "overwrite",
        "progress",
        "quiet",
        "resume",
        "run_dir",
        "stage",
        "timeout",
    }
)
"""What may differ between ranks, since the result does not depend on it."""


def agreed(options: BaseModel) -> dict[str, Any]:
    """Return what all ranks must agree on: everything but ``LOCAL_FIELDS``, as JSON types."""
    return options.model_dump(mode="json", exclude=set(LOCAL_FIELDS))


def fingerprint(options: BaseModel) -> str:
    """Return the SHA-256 of :func:`agreed`, the same on every machine."""
    text = json.dumps(agreed(options), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Return a line such as ``"aladdin.pi: 4 and 2"`` for each difference.

    ``a`` and ``b`` are configurations as :func:`agreed` gives them.
    """
    flat_a, flat_b = _flat(a), _flat(b)
    return [
        f"{dotted(path)}: {flat_a.get(path, 'absent')} and {flat_b.get(path, 'absent')}"
        for path in sorted(flat_a.keys() | flat_b.keys())
        if flat_a.get(path, "absent") != flat_b.get(path, "absent")
    ]


def _flat(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for name, value in table.items():
        place = (*path, name)
        found |= _flat(value, place) if isinstance(value, Mapping) else {place: value}
    return found
