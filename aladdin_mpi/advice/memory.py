"""Memory of a worker by algorithm, from measurements."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from aladdin_mpi.advice.candidates import Candidate
from aladdin_mpi.advice.tables import read_table

DEFAULT = "default"
"""The key of the wire format that ``--wire auto`` chooses."""


@cache
def table() -> Mapping[str, Mapping[str, tuple[float, float]]]:
    """Return GPU and pinned host memory in models, by algorithm and wire format."""
    return {
        name: {wire: (device, pinned) for wire, (device, pinned) in of.items()}
        for name, of in read_table("memory.toml").items()
    }


def worker_models(candidate: Candidate) -> tuple[float, float] | None:
    """Return a worker's GPU and pinned host memory, in models; None if not measured."""
    if candidate.has_islands:
        return None  # depends on the workers per node
    return table().get(candidate.algorithm, {}).get(candidate.wire or DEFAULT)
