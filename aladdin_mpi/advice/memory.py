"""Memory of workers and servers by algorithm, from measurements."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from aladdin_mpi.advice.candidates import Candidate
from aladdin_mpi.advice.tables import read_table

LEAST = (2.0, 0.0)
"""Of any worker: the parameters and a gradient."""
DEFAULT = "default"
"""The key of the wire format that ``--wire auto`` chooses."""


@cache
def table() -> Mapping[str, Mapping[str, tuple[float, float]]]:
    """Return GPU and pinned host memory in models, by algorithm and wire format."""
    return {
        name: {wire: (device, pinned) for wire, (device, pinned) in of.items()}
        for name, of in read_table("memory.toml").items()
    }


def worker_models(candidate: Candidate, node: int) -> tuple[float, float] | None:
    """Return a worker's GPU and pinned host memory, in models; None if not measured.

    A member of an island of all ``node`` workers of a host has the whole model and gradient, in
    host memory too, where they are sent and received. Everything that a single worker has is
    divided among the members, with a part of a model to send and those of the others' gradients to
    receive.
    """
    measured = table().get(candidate.algorithm, {}).get(candidate.wire or DEFAULT)
    return None if measured is None else _of_member(measured, candidate, node)


def least_models(candidate: Candidate, node: int) -> float:
    """Return a lower bound of a worker's GPU memory, in models.

    For an unmeasured wire format it is that of the algorithm's smallest measured one.
    """
    known = table().get(candidate.algorithm, {})
    models = known.get(candidate.wire or DEFAULT) or min(known.values(), default=LEAST)
    return _of_member(models, candidate, node)[0]


def _of_member(models: tuple[float, float], candidate: Candidate, node: int) -> tuple[float, float]:
    """Return a worker's memory: ``models``, or less as a member of an island."""
    device, pinned = models
    return (2 + device / node, 3 + pinned / node) if candidate.has_islands else models


def server_models(candidate: Candidate, workers: int) -> float | None:
    """Return a server's host memory, in models; None if not measured.

    ``workers`` send to each server: with islands, those of a lane.
    """
    measured = read_table("server_memory.toml").get(candidate.algorithm)
    if measured is None or not candidate.servers or candidate.wire:
        return None
    parts = measured["divided"] + workers * measured["worker"]
    return float(measured["undivided"] + parts / candidate.servers)
