"""Order of samples: shards, epochs and seeking."""

from __future__ import annotations

import random
from collections import Counter
from copy import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aladdin_mpi.data.sampler import SHUFFLING, Period, Rest, ShardedStream, bounded, sample_keys
from aladdin_mpi.errors import UserError


@settings(max_examples=40)
@given(length=st.integers(1, 60), workers=st.integers(1, 9), epoch=st.integers(0, 5))
def test_stream_shards_of_an_epoch_are_disjoint_and_complete(
    length: int, workers: int, epoch: int
) -> None:
    workers = min(workers, length)
    shards = []
    for worker in range(workers):
        stream = ShardedStream(length, worker, workers, seed=3)
        stream.position = epoch * stream.shard_size
        epochs, indices = stream.take(stream.shard_size)
        assert (epochs == epoch).all()
        shards.append(indices)
    assert sorted(np.concatenate(shards)) == list(range(length))
    sizes = [len(shard) for shard in shards]
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=40)
@given(start=st.integers(0, 100), counts=st.lists(st.integers(0, 30), max_size=6))
def test_stream_seek_matches_sequential_reading(start: int, counts: list[int]) -> None:
    whole = ShardedStream(23, 1, 3, seed=5)
    epochs, indices = whole.take(start + sum(counts))
    sought = ShardedStream(23, 1, 3, seed=5)
    sought.position = start
    for count in counts:
        got_epochs, got = sought.take(count)
        assert got.tolist() == indices[start : start + count].tolist()
        assert got_epochs.tolist() == epochs[start : start + count].tolist()
        start += count
    assert sought.position == start


def test_stream_order_differs_between_epochs_and_seeds() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        stream = ShardedStream(100, 0, 1, seed)
        stream.position = 100 * epoch
        return stream.take(100)[1].tolist()

    orders = [order(seed, epoch) for seed in (0, 1, -1) for epoch in (0, 1)]
    assert len({tuple(each) for each in orders}) == 6
    assert order(0, 0) == orders[0]


def test_stream_order_does_not_depend_on_library_versions() -> None:
    """These numbers must never change, or resumed runs would use other samples."""
    assert ShardedStream(10, 0, 1, seed=7).take(10)[1].tolist() == GOLDEN_ORDER


GOLDEN_ORDER = [1, 7, 5, 3, 9, 8, 2, 0, 4, 6]


def test_stream_shuffles_positions_evenly() -> None:
    """Over many epochs, each sample comes first about equally often."""
    first = [ShardedStream(8, 0, 1, seed).take(1)[1][0] for seed in range(4000)]
    counts = np.bincount(first, minlength=8)
    assert counts.min() > 400 and counts.max() < 600  # 500 expected, deviation 21


def test_stream_resumes_at_saved_position() -> None:
    stream = ShardedStream(17, 0, 2, seed=1)
    stream.take(12)
    other = ShardedStream(17, 0, 2, seed=1)
    other.position = stream.position
    assert other.position == 12 and other.epoch == 1
    assert other.take(9)[1].tolist() == stream.take(9)[1].tolist()


def test_stream_copy_is_independent() -> None:
    stream = ShardedStream(17, 0, 2, seed=1)
    stream.take(5)
    other = copy(stream)
    other.take(3)
    assert (stream.position, other.position) == (5, 8)


def test_stream_rejects_fewer_samples_than_workers() -> None:
    with pytest.raises(UserError, match=r"\b3 samples\b.*\b4 workers\b"):
        ShardedStream(3, 0, 4, seed=0)


def test_bounded_random_numbers_cover_range_evenly() -> None:
    keys = sample_keys(0, SHUFFLING, 0, np.arange(90_000))
    for field in range(4):
        counts = np.bincount(bounded(keys, field, 9), minlength=9)
        assert len(counts) == 9
        assert counts.min() > 9_500 and counts.max() < 10_500  # 10,000 expected, deviation 94


def test_stream_reads_every_sample_once_when_worker_count_changes() -> None:
    """Workers have unequal speeds, and their number changes several times."""
    draw = random.Random(4)
    for _ in range(40):
        length = draw.randint(5, 23)
        past: list[Period] = []
        seen: Counter[tuple[int, int]] = Counter()
        for workers in [draw.randint(1, 5) for _ in range(4)]:
            taken = [draw.choice([0, 1, 3, 9, 40]) for _ in range(workers)]
            for worker, count in enumerate(taken):
                stream = ShardedStream(length, worker, workers, 3, past=past)
                for part in (count // 2, count - count // 2):
                    seen.update(zip(*(each.tolist() for each in stream.take(part)), strict=True))
                assert copy(stream).take(7)[0][0] == stream.epoch
            past.append(Period(tuple(taken)))
        assert set(seen.values()) <= {1}
        rest = Rest.after(length, past)
        left = set(zip(rest.epochs.tolist(), rest.places.tolist(), strict=True))
        assert len(seen) + len(left) == rest.first_epoch * length


def test_rest_excludes_samples_of_failed_worker() -> None:
    rest = Rest.after(12, [Period((5, None, 2))])
    assert rest.first_epoch == 2
    assert {place % 3 for place in rest.places.tolist()} == {0, 2}
