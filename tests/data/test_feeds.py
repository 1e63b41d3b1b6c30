"""Objects accepted by ``run.batches()``, distributed to the workers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from aladdin_mpi.data.feeds import Feed, FeedShare, feed_of
from aladdin_mpi.errors import UserError

LENGTH, WORKERS, BATCH = 23, 3, 2


class Words(Dataset[Any]):
    """Samples of unequal lengths."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"number": index, "word": torch.arange(index % 4 + 1)}


class Stream(IterableDataset[Any]):
    """The same samples as an iterable that can only be read in order."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


class OfOneLength(BatchSampler):
    """Batches of words of equal length, in random order."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = [list(range(n, LENGTH, 4)) for n in range(4)]
        yield from (batches[n] for n in torch.randperm(4).tolist())

    def __len__(self) -> int:
        return 4


def ragged(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "numbers": [sample["number"] for sample in samples],
        "words": [sample["word"] for sample in samples],
    }


def numbers(batch: Any) -> list[int]:
    return batch["numbers"] if isinstance(batch, dict) else batch.tolist()


def taken(feed: Feed, worker: int, batches: int, done: int = 0, count: int = BATCH) -> list[Any]:
    source = feed.source(FeedShare(worker, WORKERS, 7, BATCH, done))
    return [numbers(source.next_batch(count)) for _ in range(batches)]


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def loader(**arguments: Any) -> Feed:
    return feed_of(DataLoader(Words(), collate_fn=ragged, **arguments), False, BATCH)


@pytest.mark.parametrize("shuffle", [True, False])
def test_loader_samples_are_sharded_once_per_epoch(shuffle: bool) -> None:
    feed = loader(batch_size=BATCH, shuffle=shuffle)
    assert (feed.batch_size, feed.length(BATCH)) == (BATCH, LENGTH)
    shards = [flat(taken(feed, worker, 4))[: 8 - (worker == 2)] for worker in range(WORKERS)]
    assert sorted(flat(shards)) == list(range(LENGTH))
    assert shards == [flat(taken(feed, worker, 4))[: 8 - (worker == 2)] for worker in range(3)]
    in_order = [list(range(LENGTH))[worker::WORKERS] for worker in range(WORKERS)]
    assert (shards == in_order) is not shuffle


def test_feed_resumes_at_given_position() -> None:
    for feed in (
        loader(batch_size=BATCH, shuffle=True),
        loader(batch_size=BATCH, sampler=WeightedRandomSampler([1.0] * LENGTH, 40)),
        loader(batch_sampler=OfOneLength(range(LENGTH), 6, False)),
    ):
        straight = taken(feed, 1, 9)
        assert taken(feed, 1, 4, done=5 * BATCH) == straight[5:]


def test_feed_returns_short_batch_when_fewer_samples_are_requested() -> None:
    feed = loader(batch_size=BATCH, shuffle=True)
    source = feed.source(FeedShare(0, WORKERS, 7, BATCH))
    parts = [numbers(source.next_batch(count)) for count in (2, 1, 2, 2)]
    assert [len(part) for part in parts] == [2, 1, 2, 2]
    assert flat(parts) == flat(taken(feed, 0, 4))[:7]


def test_sampler_draws_same_order_on_all_workers() -> None:
    """The workers take parts of one epoch, although their samplers draw differently."""
    weights = [1.0] * 5 + [0.0] * (LENGTH - 5)

    def part(worker: int) -> list[int]:
        torch.manual_seed(worker)
        before = torch.get_rng_state()
        feed = loader(batch_size=1, sampler=WeightedRandomSampler(weights, 30))
        result = flat(taken(feed, worker, 10, count=BATCH))[:10]
        assert torch.equal(torch.get_rng_state(), before)
        return result

    parts = [part(worker) for worker in range(WORKERS)]
    assert set(flat(parts)) <= set(range(5))
    torch.manual_seed(99)
    feed = loader(batch_size=1, sampler=WeightedRandomSampler(weights, 30))
    whole = [numbers(feed.source(FeedShare(0, 1, 7, 1)).next_batch(30))]
    assert [whole[0][worker::WORKERS] for worker in range(WORKERS)] == parts


def test_feed_keeps_batches_of_batch_sampler_whole() -> None:
    feed = loader(batch_sampler=OfOneLength(range(LENGTH), 6, False))
    assert feed.length(6) == 24  # each batch counts as 6
    dealt = [taken(feed, worker, 1) for worker in range(WORKERS)]
    for (batch,) in dealt:
        assert len({number % 4 for number in batch}) == 1
    assert len(set(flat([flat(each) for each in dealt]))) == sum(len(b) for (b,) in dealt)


def test_iterable_is_sharded_by_batches_and_restarts() -> None:
    feed = feed_of(DataLoader(Stream(), batch_size=BATCH), False, BATCH)
    assert feed.caveat and not loader(batch_size=BATCH).caveat
    assert taken(feed, 0, 5) == [[0, 1], [6, 7], [12, 13], [18, 19], [0, 1]]
    assert taken(feed, 2, 2) == [[4, 5], [10, 11]]
    assert flat(taken(feed_of(Stream(), False, BATCH), 1, 2)) == [2, 3, 8, 9]
    own = feed_of(DataLoader(Stream(), batch_size=BATCH), True, BATCH)
    assert taken(own, 2, 2) == [[0, 1], [2, 3]]


def test_epoch_of_sharded_batches_is_one_pass_of_every_worker() -> None:
    class Windows:
        def __iter__(self) -> Iterator[int]:
            return iter(range(5))

        def __len__(self) -> int:
            return 5

    assert feed_of(Windows(), True, BATCH).length(BATCH, WORKERS) == 5 * BATCH * WORKERS
    assert feed_of(Windows(), False, BATCH).length(BATCH, WORKERS) == 5 * BATCH


@pytest.mark.parametrize("count", [2, 5])
def test_batches_of_an_iterable_are_used_equally_often(count: int) -> None:
    """Also if the workers do not divide them, or are more."""

    class Batches:
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.arange(count).reshape(-1, 1))

    feed = feed_of(Batches(), False, 1)
    used = Counter(flat([flat(taken(feed, worker, 2 * count)) for worker in range(WORKERS)]))
    assert used == dict.fromkeys(range(count), 2 * WORKERS)


def test_feed_rejects_iterable_without_batches() -> None:
    class Empty(IterableDataset[Any]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    with pytest.raises(UserError, match=r"batches\(\).*at least one batch"):
        taken(feed_of(DataLoader(Empty(), batch_size=20), False, 20), 2, 1)


def test_feed_length_is_none_for_unsized_data() -> None:
    class Endless:
        def __iter__(self) -> Iterator[int]:
            return iter(int, 1)

    assert feed_of(Endless(), False, BATCH).length(BATCH) is None
    assert feed_of(Stream(), False, BATCH).length(BATCH) is None
    assert loader(batch_size=3, sampler=RandomSampler(Words(), True, 31)).length(3) == 31


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (iter([1]), "list_iterator"),
        (iter(Words()), "iterator"),
        (iter(DataLoader(Words())), "_SingleProcessDataLoaderIter"),
        ({"a": 1}, "dict"),
        (64, "int"),
        (DataLoader(Words(), sampler=DistributedSampler(Words(), 2, 0)), "DistributedSampler"),
    ],
)
def test_feed_of_rejects_unsupported_data(data: Any, kind: str) -> None:
    with pytest.raises(UserError, match=rf"batches\(\).*\b{kind}\b"):
        feed_of(data, False, BATCH)


def pairs(*shape: int) -> list[Any]:
    return [(torch.ones(shape), torch.zeros(shape[:1])) for _ in range(6)]


@pytest.mark.parametrize(
    "data",
    [pairs(4, 3), pairs(3), tuple(pairs(3)), [torch.ones(3)] * 4, [[0, 1], [2]], [{"x": [1, 2]}]],
)
def test_feed_of_rejects_ambiguous_list_of_samples_or_batches(data: Any) -> None:
    remedies = r"batches\(\).*DataLoader\(data, batch_size=\.\.\.\).*batch_size=None"
    with pytest.raises(UserError, match=remedies):
        feed_of(data, False, BATCH)


@pytest.mark.parametrize("label", [3, "three", torch.tensor(3), None])
def test_feed_of_accepts_list_of_samples_with_scalar_label(label: Any) -> None:
    feed = feed_of([(torch.ones(4), label)] * 6, False, BATCH)
    assert feed.length(BATCH) == 6
    if label is not None:  # which torch cannot collate
        inputs, _ = feed.source(FeedShare(0, 1, 7, BATCH)).next_batch(BATCH)
        assert inputs.shape == (BATCH, 4)


def test_loader_without_batch_size_shards_list_of_batches() -> None:
    batches: Any = [torch.arange(4) + 4 * number for number in range(6)]
    feed = feed_of(DataLoader(batches, batch_size=None), False, 4)
    dealt = [taken(feed, worker, 2) for worker in range(WORKERS)]
    assert dealt == [[batches[n].tolist(), batches[n + 3].tolist()] for n in range(WORKERS)]


def endless() -> Iterator[torch.Tensor]:
    yield from (torch.tensor([number]) for number in itertools.count())


@pytest.mark.parametrize("sharded", [False, True])
def test_endless_generator_is_sharded_by_batches(sharded: bool) -> None:
    feeds = [feed_of(endless(), sharded, BATCH) for _ in range(WORKERS)]  # each worker has its own
    dealt = [flat(taken(feed, worker, 3)) for worker, feed in enumerate(feeds)]
    assert dealt == ([[0, 1, 2]] * 3 if sharded else [[0, 3, 6], [1, 4, 7], [2, 5, 8]])
    assert feeds[0].length(BATCH) is None
    assert feeds[0].caveat


def test_feed_rejects_iterator_that_ends_before_run() -> None:
    feed = feed_of(itertools.islice(endless(), 4), False, BATCH)
    with pytest.raises(UserError, match=r"batches\(\).*\bislice\b.*\b4\b"):
        taken(feed, 0, 3)


def test_iterator_is_continued_by_another_source() -> None:
    """As after a failure, with other numbers of workers."""
    feed = feed_of(itertools.count(), False, BATCH)
    first = feed.source(FeedShare(1, 3, 7, BATCH))
    assert [first.next_batch(BATCH) for _ in range(3)] == [1, 4, 7]
    second = feed.source(FeedShare(0, 2, 7, BATCH))
    assert [second.next_batch(BATCH) for _ in range(3)] == [8, 10, 12]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [(["b", "c", "a"], ["B", "C", "A"]), ([(1, 2), (3, 4)], [3, 7]), ([[1, 2], [0]], [3, 0])],
    ids=["names", "pairs", "lists"],
)
def test_keys_of_samples_need_not_be_numbers(keys: list[Any], expected: list[Any]) -> None:
    """With ``batch_size=None``, a sampler of lists is torch's way to load batches at once."""

    class Keyed(Dataset[Any]):
        def __getitem__(self, key: Any) -> Any:
            return key.upper() if isinstance(key, str) else sum(key)

        def __len__(self) -> int:
            return len(keys)

    data: DataLoader[Any] = DataLoader(Keyed(), batch_size=None, sampler=keys)
    source = feed_of(data, False, BATCH).source(FeedShare(0, 1, 7, BATCH))
    assert [source.next_batch(BATCH) for _ in keys] == expected


class Seeds(Dataset[int]):
    """Samples are the seeds of the loader processes."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        info = get_worker_info()
        assert info is not None
        return info.seed


def test_loader_processes_of_all_workers_and_restarts_have_own_seeds() -> None:
    seeds = []
    for data in (Seeds(), DataLoader(Seeds(), 2, num_workers=1)):
        feed = feed_of(data, False, 2)
        for worker, done in ((0, 0), (1, 0), (0, 4)):
            source = feed.source(FeedShare(worker, 2, 7, 2, done, processes=1))
            seeds.append(int(source.next_batch(2)[0]))
            source.close()
    assert len(set(seeds[:3])) == 3
    assert seeds[:3] == seeds[3:]
