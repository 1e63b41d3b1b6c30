"""Every argument of torch's DataLoader is applied by a run or rejected by name."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from aladdin_mpi.data import loading
from aladdin_mpi.data.augment import Normalisation, SmallImages
from aladdin_mpi.data.feeds import Feed, FeedShare, feed_of
from aladdin_mpi.data.images import ImageArrays
from aladdin_mpi.errors import UserError

LENGTH, BATCH = 23, 4


class Numbers(Dataset[Any]):
    """Each sample is its number."""

    offset = 0

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return self.offset + index


class Processes(Numbers):
    """Each sample is the number of the process that loads it, and its process id."""

    def __getitem__(self, index: int) -> tuple[int, int]:
        info = get_worker_info()
        return -1 if info is None else info.id, os.getpid()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


def loader(**arguments: Any) -> DataLoader[Any]:
    return DataLoader(arguments.pop("dataset", Numbers()), **{"batch_size": BATCH, **arguments})


def batches_of(
    given: DataLoader[Any], count: int, worker: int = 0, workers: int = 1, done: int = 0
) -> list[Any]:
    """Return a worker's first batches."""
    feed = feed_of(given, False, BATCH)
    size = feed.batch_size or BATCH
    share = FeedShare(worker, workers, 7, size, done, feed.loader_workers or 0)
    source = feed.source(share)
    result = [source.next_batch(size) for _ in range(count)]
    return [each.tolist() if isinstance(each, torch.Tensor) else each for each in result]


def plain(given: DataLoader[Any], epochs: int = 1) -> list[list[int]]:
    """Return the batches that torch returns."""
    return [batch.tolist() for _ in range(epochs) for batch in given]


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def refused(words: str, sharded: bool = False, **arguments: Any) -> None:
    with pytest.raises(UserError, match=words):
        feed_of(loader(**arguments), sharded, BATCH)


# -- one check for each argument --------------------------------------------------------------
def check_dataset() -> None:
    assert flat(batches_of(loader(batch_size=LENGTH), 1)) == [*range(LENGTH)]


def check_batch_size() -> None:
    assert len(batches_of(loader(batch_size=3), 1)[0]) == 3
    items: Any = [torch.arange(3) + 10 * number for number in range(5)]  # each is a batch
    given = partial(DataLoader, items, batch_size=None)
    assert batches_of(given(), 5) == [each.tolist() for each in items]
    drawn = [batches_of(given(shuffle=True), 4, worker, 2) for worker in range(2)]
    assert sorted(flat(drawn[0][:3] + drawn[1][:2])) == sorted(map(int, torch.cat(items)))
    assert batches_of(given(shuffle=True), 2, 1, 2, done=2 * BATCH) == drawn[1][2:]
    doubled: DataLoader[Any] = DataLoader(items, batch_size=None, collate_fn=lambda item: 2 * item)
    assert batches_of(doubled, 1) == [[0, 2, 4]]


def check_shuffle() -> None:
    order = flat(batches_of(loader(batch_size=LENGTH, shuffle=True), 1))
    assert order != sorted(order) == [*range(LENGTH)]


def check_sampler() -> None:
    assert batches_of(loader(sampler=[3, 1, 2]), 1) == [[3, 1, 2, 3]]
    weighted = WeightedRandomSampler([0.0] * (LENGTH - 1) + [1.0], 8)
    assert set(flat(batches_of(loader(sampler=weighted), 2))) == {LENGTH - 1}


def check_batch_sampler() -> None:
    given = partial(BatchSampler, SequentialSampler(range(LENGTH)), 5)
    for drop_last in (False, True):
        whole = DataLoader(Numbers(), batch_sampler=given(drop_last))
        assert batches_of(whole, 2 * len(whole)) == plain(whole, 2)


def check_num_workers() -> None:
    result = batches_of(loader(dataset=Processes(), num_workers=2), 2)
    assert {int(number) for numbers, _ in result for number in numbers} == {0, 1}


def check_collate_fn() -> None:
    assert batches_of(loader(collate_fn=sum), 1) == [0 + 1 + 2 + 3]
    images = torch.randint(1, 256, (LENGTH, 3, 8, 8), dtype=torch.uint8)
    arrays = ImageArrays(
        images,
        torch.arange(LENGTH),
        SmallImages(Normalisation((0.0,) * 3, (1.0,) * 3), 1, flip=True),
    )
    ((inputs, labels),) = batches_of(loader(dataset=arrays), 1)
    whole = partial(loader, dataset=arrays, collate_fn=list)
    for given in whole(), whole(num_workers=1):  # which data sets in memory do not need
        (samples,) = batches_of(given, 1)
        assert [label for _, label in samples] == labels.tolist()
        assert torch.equal(torch.stack([image for image, _ in samples]), inputs)


def check_pin_memory() -> None:
    # Delivery pins every copy to a device, which tests/late checks.
    assert batches_of(loader(pin_memory=True), 2) == plain(loader())[:2]


def check_pin_memory_device() -> None:
    given = loader(pin_memory=True, pin_memory_device="cuda")
    assert batches_of(given, 2) == plain(loader())[:2]


def check_drop_last() -> None:
    whole = loader(drop_last=True)
    assert batches_of(whole, 10) == plain(whole, 2)
    feed = feed_of(whole, False, BATCH)
    assert [feed.length(BATCH, workers) for workers in (1, 2, 3, 6)] == [20, 16, 12, 0]
    union = plain(loader(batch_size=3 * BATCH, drop_last=True), 2)  # of three workers
    theirs = [batches_of(whole, 2, worker, 3) for worker in range(3)]
    rounds = zip(*theirs, strict=True)
    assert [sorted(flat([*each])) for each in rounds] == union
    shuffled = loader(drop_last=True, shuffle=True)
    batches = batches_of(shuffled, 10)
    epochs = {*flat(batches[:5])}, {*flat(batches[5:])}
    assert [len(epoch) for epoch in epochs] == [20, 20]
    assert epochs[0] != epochs[1]  # others are omitted
    resumed = batches_of(shuffled, 3, 1, 2, done=3 * BATCH)
    assert resumed == batches_of(shuffled, 6, 1, 2)[3:]


class Slow(Numbers):
    def __getitem__(self, index: int) -> int:
        time.sleep(2)
        return index


def check_timeout() -> None:
    with pytest.raises(RuntimeError, match=r"timed out after 0\.2 seconds"):
        batches_of(loader(dataset=Slow(), batch_size=1, num_workers=1, timeout=0.2), 2)
    refused("timeout .*num_workers", timeout=3)


def move(number: int) -> None:
    """Initialise a loader process as torch's documentation does, by this process's data set."""
    info = get_worker_info()
    assert info is not None
    info.dataset.offset = 100 * (number + 1)  # type: ignore[attr-defined]


class Seeds(Numbers):
    """Each sample is the seed of its loader process."""

    seed = 0

    def __getitem__(self, index: int) -> int:
        return self.seed


def note_seed(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.seed = torch.initial_seed()  # type: ignore[attr-defined]


def check_worker_init_fn() -> None:
    result = batches_of(loader(num_workers=2, worker_init_fn=move), 2)
    assert result == [[100, 101, 102, 103], [204, 205, 206, 207]]
    sized = partial(loader, batch_sampler=[[0, 1], [2]], batch_size=1)
    assert batches_of(sized(num_workers=1, worker_init_fn=move), 2) == [[100, 101], [102]]
    given = partial(loader, dataset=Seeds(), batch_size=1, num_workers=2, worker_init_fn=note_seed)
    assert len({seed for n in range(2) for (seed,) in batches_of(given(), 2, n, 2)}) == 4


def check_multiprocessing_context() -> None:
    feed = feed_of(loader(num_workers=1, multiprocessing_context="spawn"), False, BATCH)
    assert feed.loader_start_method == "spawn"
    assert feed_of(loader(num_workers=1), False, BATCH).loader_start_method is None


def check_generator() -> None:
    def given(**arguments: Any) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(5)
        if arguments.pop("weighted", False):
            arguments["sampler"] = WeightedRandomSampler([1.0] * 5, LENGTH, generator=generator)
        return loader(batch_size=LENGTH, generator=generator, **arguments)

    workers = {"num_workers": 1, "persistent_workers": True}
    for arguments in {"shuffle": True}, {"weighted": True}, {"shuffle": True, **workers}:
        whole = plain(given(**arguments), 3)
        assert batches_of(given(**arguments), 3) == whole
        assert batches_of(given(**arguments), 1, done=2 * LENGTH) == whole[2:]
    first = feed_of(given(shuffle=True), False, BATCH).facts()
    assert first == feed_of(given(shuffle=True), False, BATCH).facts()
    other = loader(shuffle=True, generator=torch.Generator().manual_seed(6))
    assert first != feed_of(other, False, BATCH).facts()  # so workers that differ do not start
    seeds = [loader(generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    assert len({str(feed_of(each, False, BATCH).facts()) for each in seeds}) == 1  # no order


def check_prefetch_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Recorded(DataLoader[Any]):
        def __init__(self, *args: Any, **arguments: Any) -> None:
            super().__init__(*args, **arguments)
            made.append(self.prefetch_factor)

    given = loader(num_workers=1, prefetch_factor=5)
    monkeypatch.setattr(loading, "DataLoader", Recorded)
    batches_of(given, 1)
    assert made == [5]


def check_persistent_workers() -> None:
    given = loader(dataset=Processes(), num_workers=1, persistent_workers=True)
    assert len({int(ids[0]) for _, ids in batches_of(given, 12)}) == 1


def check_in_order() -> None:
    refused("in_order=False", num_workers=1, in_order=False)
    refused("in_order=False", dataset=Stream(), num_workers=1, in_order=False)
    own = loader(dataset=Stream(), num_workers=1, in_order=False)
    assert isinstance(feed_of(own, True, BATCH), Feed)
    assert batches_of(loader(in_order=False), 2) == plain(loader())[:2]  # without effect


CHECKS: dict[str, Callable[..., None]] = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}
ARGUMENTS = [name for name in inspect.signature(DataLoader.__init__).parameters if name != "self"]


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_loader_argument_is_applied_or_rejected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails for an argument that a new torch adds and that is missing here."""
    assert name in CHECKS, f"a run drops {name} of a DataLoader: follow or refuse it"
    check = CHECKS[name]
    check(monkeypatch) if inspect.signature(check).parameters else check()


# -- subclasses and samplers ------------------------------------------------------------------
class Negated(DataLoader[Any]):
    """A loader subclass that changes the batches it returns."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return (-batch for batch in super().__iter__())


def test_loader_subclass_keeps_iteration_and_shuffles_alike_on_all_workers() -> None:
    given = partial(Negated, Numbers(), batch_size=BATCH, shuffle=True)

    def part(worker: int) -> list[list[int]]:
        torch.manual_seed(worker)
        before = torch.get_rng_state()
        result = batches_of(given(), 3, worker, 2)
        assert torch.equal(torch.get_rng_state(), before)
        return result

    epoch = flat(part(0) + part(1))
    assert sorted(epoch) == [*range(1 - LENGTH, 1)]
    feed = feed_of(given(), True, BATCH)
    torch.manual_seed(3)
    expected = next(iter(given())).tolist()
    torch.manual_seed(3)
    assert feed.source(FeedShare(1, 2, 7, BATCH)).next_batch(BATCH).tolist() == expected


class Wrong(Sampler[int]):
    """A sampler whose length is wrong."""

    def __init__(self, listed: int | None) -> None:
        self.listed = listed

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.listed)) if self.listed is not None else iter(int, 1)

    def __len__(self) -> int:
        return 8


class Unsized(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


@pytest.mark.parametrize(("listed", "words"), [(7, "7"), (9, "more"), (None, "more")])
def test_loader_rejects_sampler_that_differs_from_its_length(
    listed: int | None, words: str
) -> None:
    with pytest.raises(UserError, match=rf"\bWrong\b.*\b8\b.*\b{words}\b.*\b0\b"):
        batches_of(loader(sampler=Wrong(listed)), 2)


def test_loader_rejects_sampler_without_length() -> None:
    refused("sampler Unsized .*__len__", sampler=Unsized())


def test_feed_of_rejects_sharded_map_style_data() -> None:
    refused("sharded=True", sharded=True)
    with pytest.raises(UserError, match=r"sharded=True.*\bNumbers\b"):
        feed_of(Numbers(), True, BATCH)
