"""States of lanes, divided into those of other lanes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from aladdin_mpi.flat.lanes import Lane, make_lanes, make_sharded_lanes
from aladdin_mpi.flat.layout import cut
from aladdin_mpi.flat.state import MergedState
from aladdin_mpi.session.islands import Islands
from aladdin_mpi.session.lane_change import LaneCut, counts_of_lane

SIZES = [7, 1, 12, 30, 4]
NUMEL = sum(SIZES)


def by_rows(count: int) -> Sequence[Lane]:
    """Return lanes that have parts of each parameter, as FSDP divides them; some are empty."""
    held: list[list[slice]] = [[] for _ in range(count)]
    first = 0
    for size in SIZES:
        rows = -(-size // count)
        for number, each in enumerate(held):
            start, stop = min(number * rows, size), min((number + 1) * rows, size)
            each.append(slice(first + start, first + stop))
        first += size
    return make_sharded_lanes(held, lambda numel: cut(numel, 1, 2e-5, 1.0))


def by_pieces(count: int, servers: int) -> Sequence[Lane]:
    return make_lanes(cut(NUMEL, servers, 6e-5, 1.0), count)


LANES = st.one_of(
    st.builds(by_rows, st.integers(1, 4)),
    st.builds(by_pieces, st.integers(1, 3), st.integers(1, 3)),
)


def positions(lane: Lane) -> Tensor:
    """Return for each value of a lane its position in the whole vector."""
    whole = torch.arange(NUMEL, dtype=torch.float32)
    return torch.cat([whole[part] for part in lane.widen(slice(0, NUMEL))])


def state_of(lane: Lane, edges: Sequence[int]) -> MergedState:
    """Return a state whose values are their positions; ranges end at ``edges``."""
    values = positions(lane)
    numel = values.numel()
    starts = [0, *sorted({edge % numel for edge in edges} - {0}), numel]
    ranges: list[dict[str, Any]] = [
        {"start": a, "stop": b, "state": {"sum": values[a:b].clone(), "step": torch.tensor(3.0)}}
        for a, b in pairwise(starts)
    ]
    parts = [
        {
            "start": each["start"],
            "stop": each["stop"],
            "state": {
                "inner": {"state": {5: each["state"]}},
                "starts": [0],
                "stops": [each["stop"] - each["start"]],
                "numbers": [5],
            },
        }
        for each in ranges
    ]
    optimizer = {"parts": parts, "inherited": [], "groups": [{"lr": 0.1}]}
    worker = {"optimizer": optimizer, "codec": {"left": values.clone()}, "w": 1.5, "none": None}
    return MergedState(values.clone(), worker, {"shards": ranges, "applied": lane.number})


@given(former=LANES, now=LANES, edges=st.lists(st.integers(0, 60), max_size=4))
def test_values_stay_at_their_positions(
    former: Sequence[Lane], now: Sequence[Lane], edges: list[int]
) -> None:
    for lane in now:
        expected, merged = positions(lane), None
        for each in former:
            change = LaneCut(lane, each)
            common = set(expected.tolist()) & set(positions(each).tolist())
            assert change.is_empty == (not common)
            if not change.is_empty:
                merged = change.add(merged, state_of(each, edges))
        assert merged is not None
        assert torch.equal(merged.model, expected)
        assert torch.equal(merged.worker["codec"]["left"], expected)
        assert (merged.worker["w"], merged.worker["none"]) == (1.5, None)
        assert merged.worker["optimizer"]["groups"] == [{"lr": 0.1}]
        for ranges in (merged.worker["optimizer"]["inherited"], merged.server["shards"]):
            found = torch.full_like(expected, -1.0)
            for each in ranges:
                assert (found[each["start"] : each["stop"]] == -1).all()
                found[each["start"] : each["stop"]] = each["state"]["sum"]
                assert each["state"]["step"] == 3
            assert torch.equal(found, expected)


def test_equal_lanes_are_recognised() -> None:
    for lanes in (by_rows(3), by_pieces(2, 3)):
        assert [LaneCut(lane, lanes[1]).is_whole for lane in lanes] == [
            lane.number == 1 for lane in lanes
        ]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_counts_are_kept(size: int, former_lanes: int, lanes: int) -> None:
    """Of all lanes together; an island counts its gradients once."""
    former = Islands(0, [[*range(n * size, (n + 1) * size)] for n in range(3)], former_lanes)
    counts = {
        rank: {"worker.samples": 10.0 + rank, "worker.computed": 7.0, "bytes_sent": 2.0**rank}
        for rank in range(2 * size)
    } | dict.fromkeys(range(2 * size, 3 * size))
    found = [counts_of_lane(lane, lanes, former, 0, counts) for lane in range(lanes)]
    for island in range(2):
        members = [counts[rank] for rank in former.members[island]]
        own = [of_lane[island] for of_lane in found]
        for name in ("worker.samples", "bytes_sent"):
            total = sum(each[name] for each in members if each is not None)
            assert sum(each[name] for each in own if each is not None) == total
        assert [each["worker.computed"] for each in own if each is not None] == [7.0] * lanes
    assert all(of_lane[2] is None for of_lane in found)
