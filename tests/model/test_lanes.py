"""Lanes: equal parts of a model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.lanes import LaneReplica, make_lanes
from aladdin_mpi.flat.layout import cut
from aladdin_mpi.flat.replica import Replica
from tests.messages import naming


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    count=st.integers(1, 4),
    servers=st.integers(0, 3),
    values=st.integers(4, 30),
)
def test_lanes_divide_every_bucket(sizes: list[int], count: int, servers: int, values: int) -> None:
    numel = sum(sizes)
    layout = cut(numel, servers, 4e-6 * values, 1.0)
    if min(bucket.numel for bucket in layout.buckets) < count:
        with pytest.raises(UserError, match=naming("--island", "--bucket-mb")):
            make_lanes(layout, count)
        return
    lanes = make_lanes(layout, count)
    whole = torch.arange(numel, dtype=torch.float32)
    rebuilt = torch.full((numel,), -1.0)
    per_parameter = torch.zeros(len(sizes), dtype=torch.int64)
    for lane in lanes:
        own = torch.empty(lane.layout.numel)
        lane.gather(whole, own)
        assert (own.diff() > 0).all()  # in the order of the whole vector
        assert torch.equal(own, torch.cat([whole[part] for part in lane.widen(slice(0, numel))]))
        lane.scatter(own, rebuilt)
        per_parameter += torch.tensor(lane.sizes(sizes))
        start = 0
        for size in sizes:
            part = lane.narrow(slice(start, start + size))
            assert own[part].tolist() == [v for v in own.tolist() if start <= v < start + size]
            start += size
        for bucket, piece, large in zip(
            lane.layout.buckets, lane.pieces.buckets, layout.buckets, strict=True
        ):
            assert abs(bucket.numel - large.numel / count) < 1
            assert (bucket.index, bucket.server) == (large.index, large.server)
            assert torch.equal(bucket.of(own), piece.of(whole))
    assert torch.equal(rebuilt, whole)
    assert per_parameter.tolist() == sizes


def test_lane_of_a_model_has_its_values() -> None:
    replica = Replica(torch.nn.Linear(3, 5))
    lanes = make_lanes(cut(replica.numel, 0, 1.0, 1.0), 2)
    parts = [LaneReplica(replica, lane) for lane in lanes]
    assert torch.equal(torch.cat([part.parameters for part in parts]), replica.parameters)
    replica.parameters.zero_()
    assert all(part.parameters.any() for part in parts)  # it has its own memory
    parts[0].refresh()
    assert not parts[0].parameters.any() and parts[1].parameters.any()
    assert not LaneReplica(replica, None).numel
