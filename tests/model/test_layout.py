"""Layout of the flat vector in buckets and shards: complete, bounded and even."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aladdin_mpi.flat.layout import BYTES_PER_MB, BYTES_PER_VALUE, Layout, cut

SIZES = st.integers(min_value=0, max_value=30_000)
SERVERS = st.integers(min_value=1, max_value=7)
MEGABYTES = st.floats(min_value=1e-4, max_value=0.2)


def values(megabytes: float) -> int:
    return int(megabytes * BYTES_PER_MB) // BYTES_PER_VALUE


@given(SIZES, SERVERS, MEGABYTES, MEGABYTES)
def test_buckets_cover_vector_once_in_order(
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
def test_buckets_and_shards_stay_within_bounds(
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
def test_servers_own_equal_numbers_of_values(
    numel: int, servers: int, bucket_mb: float, shard_mb: float
) -> None:
    """Up to a bucket, or one value per shard."""
    layout = cut(numel, servers, bucket_mb, shard_mb)
    owned = [sum(b.numel for b in layout.owned_by(server)) for server in range(servers)]
    assert sum(owned) == numel
    assert max(owned) - min(owned) <= max(layout.largest, len(layout.owned_by(0)), 1)
    assert sum(len(layout.owned_by(server)) for server in range(servers)) == len(layout.buckets)


@given(st.integers(min_value=100, max_value=30_000), SERVERS)
def test_every_server_owns_part_of_model_of_any_size(numel: int, servers: int) -> None:
    """With one layer or ten: sharding is by memory, and the default bounds are far away."""
    layout = cut(numel, servers, 4.0, 16.0)
    assert [bucket.server for bucket in layout.buckets] == list(range(servers))


def test_shards_are_assigned_to_servers_in_turn() -> None:
    """This keeps every server's link busy throughout backward."""
    layout = cut(1200, 3, bucket_mb=0.0002, shard_mb=0.0008)
    assert shards(layout) == [200] * 6
    owners = [a.server for a, b in pairwise(layout.buckets) if a.server != b.server]
    assert owners == [0, 1, 2, 0, 1]
    assert {bucket.numel for bucket in layout.buckets} == {50}


def test_vector_larger_than_shard_bound_is_split_evenly() -> None:
    layout = cut(10, 1, bucket_mb=1.0, shard_mb=16e-6)
    assert [bucket.numel for bucket in layout.buckets] == [3, 3, 4]


def test_buckets_have_equal_sizes_without_remainder() -> None:
    layout = cut(9, 1, bucket_mb=16e-6, shard_mb=1.0)
    assert [bucket.numel for bucket in layout.buckets] == [3, 3, 3]


def test_layout_without_servers_matches_one_server() -> None:
    assert cut(1000, 0, 0.001, 1.0).buckets == cut(1000, 1, 0.001, 1.0).buckets


@pytest.mark.parametrize("bound", [1e-9, 4e-6])
def test_bucket_bound_below_one_value_means_one_value(bound: float) -> None:
    assert [bucket.numel for bucket in cut(3, 1, bound, 1.0).buckets] == [1, 1, 1]


def test_some_servers_own_nothing_if_values_are_fewer_than_servers() -> None:
    owners = {bucket.server for bucket in cut(2, 3, 4.0, 16.0).buckets}
    assert len(owners) == 2


# -- layer-wise ------------------------------------------------------------------------------

LAYERS = st.lists(st.integers(min_value=1, max_value=5_000), min_size=1, max_size=12)


def by_layer(layers: list[int], servers: int, bucket_mb: float) -> Layout:
    return cut(sum(layers), servers, bucket_mb, 1e-9, "layer", layers)


def owners_of(layers: list[int], layout: Layout) -> list[set[int]]:
    """Return for every layer the servers that own its buckets."""
    edges = [0, *accumulate(layers)]
    return [
        {b.server for b in layout.buckets if b.start < stop and start < b.stop}
        for start, stop in pairwise(edges)
    ]


@given(LAYERS, SERVERS, MEGABYTES)
def test_layer_wise_buckets_cover_vector_within_bounds(
    layers: list[int], servers: int, bucket_mb: float
) -> None:
    layout = by_layer(layers, servers, bucket_mb)
    edges = [0]
    for index, bucket in enumerate(layout.buckets):
        assert bucket.index == index
        assert bucket.start == edges[-1] < bucket.stop
        edges.append(bucket.stop)
    assert edges[-1] == layout.numel == sum(layers)
    assert layout.largest <= values(bucket_mb)


@given(LAYERS, SERVERS, MEGABYTES)
def test_layer_wise_sharding_assigns_whole_layers_to_servers(
    layers: list[int], servers: int, bucket_mb: float
) -> None:
    layout = by_layer(layers, servers, bucket_mb)
    assert [len(owners) for owners in owners_of(layers, layout)] == [1] * len(layers)
    assert layout.servers == servers
    assert len({b.server for b in layout.buckets}) == min(servers, len(layers))


@given(LAYERS, SERVERS)
def test_layer_wise_sharding_balances_servers_within_one_layer(
    layers: list[int], servers: int
) -> None:
    layout = by_layer(layers, servers, 4.0)
    owned = [sum(b.numel for b in layout.owned_by(server)) for server in range(servers)]
    assert sum(owned) == sum(layers)
    assert max(owned) - min(owned) <= max(layers)


@given(LAYERS, SERVERS)
def test_neighbouring_layers_of_one_server_share_buckets(layers: list[int], servers: int) -> None:
    layout = by_layer(layers, servers, 4.0)
    for a, b in pairwise(layout.buckets):
        assert a.server != b.server


def test_layer_wise_sharding_assigns_largest_layers_first() -> None:
    layout = by_layer([10, 70, 20, 30, 40], 2, 4.0)
    # 70 to the first; 40, 30 to the second; 20 to the first server (tie at 70); 10 to the second.
    owners = owners_of([10, 70, 20, 30, 40], layout)
    assert owners == [{1}, {0}, {0}, {1}, {1}]
    assert [(b.start, b.stop) for b in layout.buckets] == [(0, 10), (10, 100), (100, 170)]


def test_layer_wise_sharding_is_unbalanced_by_one_large_layer() -> None:
    """The reason for sharding by memory: VGG's first dense layer has most of its values."""
    layers = [10, 750, 100, 90, 50]
    owned = [sum(b.numel for b in by_layer(layers, 4, 4.0).owned_by(s)) for s in range(4)]
    assert max(owned) == 750
    by_memory = cut(1000, 4, 4.0, 16.0)
    assert [sum(b.numel for b in by_memory.owned_by(s)) for s in range(4)] == [250] * 4


def test_layer_wise_layout_without_servers_is_one_piece() -> None:
    assert by_layer([3, 4, 5], 0, 4.0).buckets == cut(12, 1, 4.0, 16.0).buckets


def test_layout_rejects_layer_sizes_that_do_not_sum_to_model_size() -> None:
    with pytest.raises(ValueError, match=r"layers\b.*\b10\b.*\b9\b"):
        cut(10, 1, 4.0, 16.0, "layer", [4, 5])
