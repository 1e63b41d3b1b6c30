"""Merged states of former lanes, cut into those of other lanes.

A merged state does not depend on buckets: what it has for each value is a vector of the lane's
length, or a list of states of ranges of values. Everything else belongs to the lane as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from aladdin_mpi.flat.lanes import Lane
from aladdin_mpi.flat.state import MergedState
from aladdin_mpi.flat.vectors import copy
from aladdin_mpi.optimizers.base import part_of, without_parts
from aladdin_mpi.session.islands import Islands
from aladdin_mpi.worker.role import LEFT_OUT, REFUSED, SAMPLES

Counts = dict[str, float]
OF_RANKS = (SAMPLES, LEFT_OUT, REFUSED, "waiting", "bytes_sent")
"""Counts of which each member of an island has its own share; others are the island's."""
RANGE = {"start", "stop", "state"}
"""Keys of the state of a range of values."""


class LaneCut:
    """What a lane has in common with a former one.

    Args:
        lane: the lane.
        former: the former one.
    """

    def __init__(self, lane: Lane, former: Lane) -> None:
        self._numel, self._former_numel = lane.layout.numel, former.layout.numel
        self._places = lane.shared(former)

    @property
    def is_empty(self) -> bool:
        """Whether the lanes have no values in common."""
        return not self._places

    @property
    def is_whole(self) -> bool:
        """Whether the lanes have the same values."""
        whole = slice(0, self._numel), slice(0, self._former_numel)
        return self._places == [whole]

    def add(self, merged: MergedState | None, found: MergedState) -> MergedState:
        """Add the lane's part of the former lane's state to what other former lanes had of it."""
        for state in (found.worker, found.server):
            if "optimizer" in state:
                state["optimizer"] = without_parts(state["optimizer"])
        fields = "model", "worker", "server"
        known = {} if merged is None else vars(merged)
        return MergedState(**{n: self._cut(getattr(found, n), known.get(n)) for n in fields})

    def _cut(self, value: Any, known: Any) -> Any:
        """Return the lane's part of a value, in addition to the ``known`` part of other lanes."""
        if isinstance(value, Tensor) and value.shape == (self._former_numel,):
            mine = value.new_zeros(self._numel) if known is None else known
            for here, there in self._places:
                copy(mine[here], value[there])
            return mine
        if isinstance(value, dict):
            others = {} if known is None else known
            return {**others, **{k: self._cut(each, others.get(k)) for k, each in value.items()}}
        if _are_ranges(value):
            return [*(known or []), *(part for each in value for part in self._parts(each))]
        return value if known is None else known

    def _parts(self, state: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the lane's parts of the state of a range of values."""
        found = []
        first, last = state["start"], state["stop"]
        for here, there in self._places:
            start, stop = max(there.start, first), min(there.stop, last)
            if start < stop:
                at = here.start + start - there.start
                part = part_of(state["state"], start - first, stop - first)
                found.append({"start": at, "stop": at + stop - start, "state": part})
        return found


def _are_ranges(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    return all(isinstance(each, dict) and each.keys() == RANGE for each in value)


def counts_of_lane(
    lane: int, lanes: int, former: Islands, source: int, counts: Mapping[int, Counts | None]
) -> list[Counts | None]:
    """Return the counts with which a lane continues, for each former island; None: it had failed.

    Together, the ``lanes`` lanes have the same samples, bytes and so on as the former ranks.

    Args:
        lane: number of the lane.
        lanes: number of lanes.
        former: the former islands.
        source: number of a former lane that has values of this one.
        counts: those of every former rank.
    """
    found: list[Counts | None] = []
    for island in former.members:
        own = counts[island[source]]
        members = [counts[rank] for rank in island[lane::lanes]]
        shares = {name: _total(name, members) for name in OF_RANKS if own and name in own}
        found.append(None if own is None else {**own, **shares})
    return found


def _total(name: str, members: Sequence[Counts | None]) -> float:
    return sum(each.get(name, 0) for each in members if each is not None)
