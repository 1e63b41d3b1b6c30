"""How the flat vector is cut: everything is covered once, within bounds, evenly."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aladdin_mpi.layout import BYTES_PER_MB, BYTES_PER_VALUE, Layout, cut

SIZES = st.integers(min_value=0, max_value=30_000)
SERVERS = st.integers(min_value=1, max_value=7)
MEGABYTES = st.floats(min_value=1e-4, max_value=0.2)


def values(megabytes: float) -> int:
    return int(megabytes * BYTES_PER_MB) // BYTES_PER_VALUE


@given(SIZES, SERVERS, MEGABYTES, MEGABYTES)
def test_the_buckets_cover_the_vector_once_in_order(
    numel: int, servers: int, bucket_mb: float, shard_mb: float
) -> None:
    layout = cut(numel, servers, bucket_mb, shard_mb)
    edges = [0]
    for index, bucket in enumerate(layout.buckets):
        assert bucket.index == index
        assert bucket.start == edges[-1] < bucket.stop
        assert bucket.part == slice(bucket.start, bucket.stop)
        assert bucket.numel == bucket.stop - bucket.start
        edges.append(bucket.stop)
    assert edges[-1] == layout.numel == numel
    assert layout.largest == max((b.numel for b in layout.buckets), default=0)


@given(SIZES, SERVERS, MEGABYTES, MEGABYTES)
def test_no_bucket_and_no_shard_is_larger_than_allowed(
    numel: int, servers: int, bucket_mb: float, shard_mb: float
) -> None:
    layout = cut(numel, servers, bucket_mb, shard_mb)
    assert layout.largest <= values(bucket_mb)
    if servers > 1:  # neighbouring buckets of one server belong to one shard
        for shard in shards(layout):
            assert shard <= values(shard_mb)


def shards(layout: Layout) -> list[int]:
    sizes: list[int] = []
    owner = None
    for bucket in layout.buckets:
        if bucket.server == owner:
            sizes[-1] += bucket.numel
        else:
            sizes.append(bucket.numel)
            owner = bucket.server
    return sizes


@given(SIZES, SERVERS, MEGABYTES, MEGABYTES)
def test_servers_own_the_same_number_of_values(
    numel: int, servers: int, bucket_mb: float, shard_mb: float
) -> None:
    """Up to one value for each shard, and so within a bucket of each other."""
    layout = cut(numel, servers, bucket_mb, shard_mb)
    owned = [sum(b.numel for b in layout.owned_by(server)) for server in range(servers)]
    assert sum(owned) == numel
    assert max(owned) - min(owned) <= max(layout.largest, 1)
    assert sum(len(layout.owned_by(server)) for server in range(servers)) == len(layout.buckets)


@given(st.integers(min_value=100, max_value=30_000), SERVERS)
def test_every_server_gets_a_part_of_a_model_of_any_size(numel: int, servers: int) -> None:
    """One layer or ten: sharding is by memory, and the default bounds are far away."""
    layout = cut(numel, servers, 4.0, 16.0)
    assert [bucket.server for bucket in layout.buckets] == list(range(servers))


def test_shards_are_dealt_in_turn() -> None:
    """So that every server's link is busy throughout backward."""
    layout = cut(1200, 3, bucket_mb=0.0002, shard_mb=0.0008)
    assert shards(layout) == [200] * 6
    owners = [a.server for a, b in pairwise(layout.buckets) if a.server != b.server]
    assert owners == [0, 1, 2, 0, 1]
    assert {bucket.numel for bucket in layout.buckets} == {50}


def test_a_layer_larger_than_the_bound_is_split_evenly() -> None:
    layout = cut(10, 1, bucket_mb=1.0, shard_mb=16e-6)
    assert [bucket.numel for bucket in layout.buckets] == [3, 3, 4]


def test_buckets_are_equal_rather_than_full_with_a_rest() -> None:
    layout = cut(9, 1, bucket_mb=16e-6, shard_mb=1.0)
    assert [bucket.numel for bucket in layout.buckets] == [3, 3, 3]


def test_without_servers_the_vector_is_cut_as_for_one() -> None:
    assert cut(1000, 0, 0.001, 1.0).buckets == cut(1000, 1, 0.001, 1.0).buckets


@pytest.mark.parametrize("bound", [1e-9, 4e-6])
def test_a_bound_below_one_value_means_one_value(bound: float) -> None:
    assert [bucket.numel for bucket in cut(3, 1, bound, 1.0).buckets] == [1, 1, 1]


def test_fewer_values_than_servers_leave_some_without() -> None:
    owners = {bucket.server for bucket in cut(2, 3, 4.0, 16.0).buckets}
    assert len(owners) == 2
