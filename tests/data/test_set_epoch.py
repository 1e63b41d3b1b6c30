"""``set_epoch()`` reaches data sets, samplers and batch samplers, in loader processes too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
)

from aladdin_mpi.data.feeds import FeedShare, feed_of
from aladdin_mpi.errors import UserError
from tests.messages import naming

LENGTH, SIZE, EPOCHS = 8, 2, 3


class Epochs(Dataset[Tensor]):
    """Samples that are the number of the epoch."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(self.epoch)


class Stream(IterableDataset[Tensor]):
    """The same as a stream."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.full((LENGTH,), self.epoch))


class Numbers(Dataset[Tensor]):
    """Samples that are their index."""

    def __len__(self) -> int:
        return LENGTH * EPOCHS

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index // LENGTH)


class Order(Sampler[Any]):
    """In epoch e, lists samples e * LENGTH and the following; ``size`` of them at once."""

    def __init__(self, size: int | None = None) -> None:
        self._size, self._epoch = size, -1

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return LENGTH // (self._size or 1)

    def __iter__(self) -> Iterator[Any]:
        numbers = list(range(self._epoch * LENGTH, (self._epoch + 1) * LENGTH))
        if self._size is None:
            return iter(numbers)
        return iter([numbers[i : i + self._size] for i in range(0, LENGTH, self._size)])


class Repeating(DataLoader[Tensor]):
    """A loader with its own ``__iter__``, which the run reads as a stream."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


FORMS: dict[str, Callable[[int], Any]] = {
    "data set": lambda processes: DataLoader(Epochs(), SIZE, num_workers=processes),
    "persistent": lambda processes: DataLoader(
        Epochs(), SIZE, num_workers=processes, persistent_workers=processes > 0
    ),
    "subset": lambda processes: DataLoader(
        ConcatDataset([Subset(Epochs(), range(4)), Subset(Epochs(), range(4))]),
        SIZE,
        shuffle=True,
        num_workers=processes,
    ),
    "without batches": lambda processes: DataLoader(
        Epochs(), batch_size=None, num_workers=processes
    ),
    "sampler": lambda processes: DataLoader(
        Numbers(), SIZE, sampler=Order(), num_workers=processes
    ),
    "batch sampler": lambda processes: DataLoader(
        Numbers(), batch_sampler=Order(SIZE), num_workers=processes
    ),
    "stream": lambda processes: DataLoader(Stream(), SIZE, num_workers=processes),
    "own loader": lambda processes: Repeating(
        Numbers(), SIZE, sampler=Order(), num_workers=processes
    ),
}


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize("form", FORMS)
def test_epoch_is_set_before_its_first_sample(form: str, processes: int) -> None:
    feed = feed_of(FORMS[form](processes), False, SIZE)
    source = feed.source(FeedShare(0, 1, 0, SIZE, processes=processes))
    size = 1 if form == "without batches" else SIZE
    batches = [source.next_batch(SIZE) for _ in range(LENGTH // size * EPOCHS)]
    source.close()
    epochs = torch.cat([torch.as_tensor(batch).reshape(-1) for batch in batches]).tolist()
    assert epochs == [epoch for epoch in range(EPOCHS) for _ in range(LENGTH)]


def test_evaluation_does_not_set_the_epoch_of_training_data() -> None:
    data = Epochs()
    data.set_epoch(2)
    batches = feed_of(DataLoader(data, SIZE), False, SIZE).share_of_pass(FeedShare(0, 1, 0, SIZE))
    assert torch.cat(list(batches)).tolist() == [2] * LENGTH


def test_persistent_processes_of_a_stream_are_refused() -> None:
    loader = DataLoader(Stream(), SIZE, num_workers=1, persistent_workers=True)
    with pytest.raises(UserError, match=naming("persistent_workers", "set_epoch()", "Stream")):
        feed_of(loader, False, SIZE)
