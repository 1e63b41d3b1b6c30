"""Marks of parameters without a gradient, in a flat gradient and in sums of gradients."""

from __future__ import annotations

import random

import pytest
import torch

from aladdin_mpi.flat.layout import between_parameters, cut
from aladdin_mpi.flat.unused import UnusedMarks, joined, shifted, used_parts, within


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("seed", range(20))
def test_sum_is_marked_unused_exactly_where_no_worker_uses_a_parameter(
    seed: int, dtype: torch.dtype
) -> None:
    r = random.Random(seed)
    sizes = [r.choice([1, 2, 7, 50]) for _ in range(r.randrange(1, 12))]
    layout = cut(sum(sizes), 0, bucket_mb=r.choice([8e-6, 60e-6, 1.0]), shard_mb=1.0)
    marks = UnusedMarks(sizes, layout)
    edges = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    unused_by_all = set(range(len(sizes)))
    total = None
    for _ in range(3):
        unused = {number for number in range(len(sizes)) if r.random() < 0.5}
        unused_by_all &= unused
        gradient = torch.randn(layout.numel, dtype=dtype).round()  # many are 0 or -0
        for number in unused:
            gradient[edges[number] : edges[number + 1]] = 0.0
        for bucket in layout.buckets:
            marks.write(bucket, bucket.of(gradient), unused)
        total = gradient if total is None else total + gradient
    assert total is not None
    expected = joined([slice(edges[n], edges[n + 1]) for n in sorted(unused_by_all)])
    result = []
    for bucket in layout.buckets:
        result += shifted(marks.read(bucket, bucket.of(total)), bucket.start)
        among = marks.read(bucket, bucket.of(total), unused)
        assert among == marks.read(bucket, bucket.of(total))
        assert joined(among) == joined(marks.parts(bucket, unused_by_all))
    assert joined(result) == expected


def test_unused_marks_change_no_value() -> None:
    layout = cut(30, 0, 1.0, 1.0)
    gradient = torch.randn(30)
    gradient[10:20] = 0.0
    before = gradient.clone()
    UnusedMarks([10, 10, 10], layout).write(layout.buckets[0], gradient, {1})
    assert torch.equal(gradient, before)


def test_used_parts_cover_all_but_unused_parts() -> None:
    assert list(used_parts(10, [])) == [slice(0, 10)]
    assert list(used_parts(10, [slice(0, 3), slice(3, 4), slice(8, 10)])) == [slice(4, 8)]
    assert list(used_parts(10, [slice(0, 10)])) == []
    assert list(used_parts(10, [slice(4, 6)])) == [slice(0, 4), slice(6, 10)]


def test_within_returns_unused_parts_relative_to_start() -> None:
    unused = [slice(2, 5), slice(8, 9), slice(20, 30)]
    assert within(slice(4, 25), unused) == [slice(0, 1), slice(4, 5), slice(16, 21)]
    assert within(slice(10, 20), unused) == []


@pytest.mark.parametrize("servers", [0, 1, 2, 3])
def test_buckets_between_parameters_hold_whole_parameters(servers: int) -> None:
    sizes = [10, 0, 3, 250, 1, 1, 40, 7, 90]
    layout = between_parameters(cut(sum(sizes), servers, 40e-6, 200e-6), sizes)
    edges = {sum(sizes[:number]) for number in range(len(sizes) + 1)}
    stop = 0
    for index, bucket in enumerate(layout.buckets):
        assert (bucket.index, bucket.start) == (index, stop)
        assert {bucket.start, bucket.stop} <= edges
        assert bucket.numel
        stop = bucket.stop
    assert stop == layout.numel == sum(sizes)
