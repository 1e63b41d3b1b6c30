"""Rows of data: arguments of ``run.batches()``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    default_collate,
)

from tests.exactness.models import Samples, mlp, squares, vectors
from tests.exactness.row import BATCH, SAMPLES, STEPS, Batch, Round, Row, Training, sgd, together
from tests.exactness.table_models import SEVERAL

OWN_SIZE = {"steps": STEPS, "batch_size": BATCH}


class Named(Samples):
    """Samples in the form of dicts."""

    def __getitem__(self, index: int) -> Any:
        return {"input": self.inputs[index], "target": self.targets[index], "number": index}


class Answer(NamedTuple):
    """Labels that belong to an input."""

    target: Tensor
    number: int


class Nested(Samples):
    """Samples of nested tuples and dicts."""

    def __getitem__(self, index: int) -> Any:
        half = {"right": self.inputs[index, 2:]}
        return (self.inputs[index, :2], half), Answer(self.targets[index], index)


class Ragged(Samples):
    """Sequences of unequal lengths."""

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index].expand(1 + index % 4, -1), self.targets[index], index


class Stream(IterableDataset[Any]):
    """Samples that can only be read in order."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[number] for number in range(len(self.samples)))


class Batches(Iterable[Any]):
    """Batches created during iteration.

    Args:
        samples: the samples in the batches.
        has_end: whether there is a last batch.
    """

    def __init__(self, samples: Samples, has_end: bool = True) -> None:
        self.samples, self.has_end = samples, has_end

    def __iter__(self) -> Iterator[Any]:
        while True:
            for first in range(0, len(self.samples), BATCH):
                yield batch_of(self.samples, range(first, first + BATCH))
            if self.has_end:
                return


class Backwards(Sampler[int]):
    """A sampler that returns the data in reverse order."""

    def __init__(self, samples: Samples) -> None:
        self.count = len(samples)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count - 1, -1, -1))


def batch_of(samples: Samples, numbers: Iterable[int]) -> Batch:
    return default_collate([samples[number] for number in numbers])


def by_name(batch: Batch) -> Any:
    return batch["number"]


def named_squares(model: nn.Module, batch: Batch) -> Tensor:
    return functional.mse_loss(model(batch["input"]), batch["target"])


def nested_squares(model: nn.Module, batch: Batch) -> Tensor:
    (left, more), answer = batch
    return functional.mse_loss(model(torch.cat([left, more["right"]], 1)), answer.target)


def as_lists(samples: list[Any]) -> Batch:
    inputs, targets, numbers = zip(*samples, strict=True)
    return list(inputs), torch.stack(targets), torch.tensor(numbers)


def ragged_squares(model: nn.Module, batch: Batch) -> Tensor:
    outputs = torch.stack([model(inputs).mean(0) * len(inputs) for inputs in batch[0]])
    return functional.mse_loss(outputs, batch[1])


def doubled(samples: list[Any]) -> Batch:
    inputs, targets, numbers = default_collate(samples)
    return 2 * inputs, targets, numbers


def filled(kind: type[Samples]) -> Samples:
    """Return the samples of :func:`vectors` in another form."""
    same = vectors()
    return kind(same.inputs, same.targets)


def own_generator(samples: Samples) -> DataLoader[Any]:
    return DataLoader(samples, BATCH, shuffle=True, generator=torch.Generator().manual_seed(5))


def batch_list(samples: Samples) -> DataLoader[Any]:
    batches: Any = list(Batches(samples))
    return DataLoader(batches, batch_size=None)


def weighted(samples: Samples) -> DataLoader[Any]:
    weights = [1.0 + number % 3 for number in range(len(samples))]
    return DataLoader(samples, BATCH, sampler=WeightedRandomSampler(weights, len(samples)))


def by_batches(samples: Samples) -> DataLoader[Any]:
    return DataLoader(samples, batch_sampler=BatchSampler(RandomSampler(samples), BATCH, False))


def train_own_batches(training: Training) -> None:
    """Train with separate batches on each worker."""
    for batch in training.batches(sharded=True):
        loss = training.loss(batch)
        loss.backward()
        training.run.step(loss)


def in_order(rounds: list[Round]) -> None:
    """Check that the workers together go through the data in the order of one process."""
    seen = [sorted(together(each)) for each in rounds]
    assert together(seen) == list(range(sum(map(len, seen))))


def backwards(rounds: list[Round]) -> None:
    seen = [sorted(together(each), reverse=True) for each in rounds]
    assert together(seen) == [SAMPLES - 1 - place for place in range(sum(map(len, seen)))]


def full_batches(rounds: list[Round]) -> None:
    assert {len(batch) for each in rounds for batch in each} == {BATCH}


def row(name: str, feed: Any = None, **more: Any) -> Row:
    """Return a row that differs from the default only in its data."""
    given = {} if feed is None else {"feed": feed}
    fields: dict[str, Any] = {"model": mlp, "loss": squares, "samples": vectors, "optimizer": sgd}
    return Row(f"data: {name}", **{**fields, **given, **more})


DATA = [
    row("data set", lambda samples: samples, settings=OWN_SIZE),
    row("DataLoader in order", partial(DataLoader, batch_size=BATCH), check=in_order),
    row("DataLoader with a generator", own_generator),
    row(
        "DataLoader without the last batch",
        partial(DataLoader, batch_size=BATCH, shuffle=True, drop_last=True),
        samples=partial(vectors, 31),
        settings={"epochs": 2},
        check=full_batches,
        is_even=False,
    ),
    row(
        "collate_fn",
        partial(DataLoader, batch_size=BATCH, shuffle=True, collate_fn=doubled),
        collate=doubled,
    ),
    row(
        "sampler",
        lambda samples: DataLoader(samples, BATCH, sampler=Backwards(samples)),
        check=backwards,
    ),
    row("sampler with replacement", weighted, is_even=False),
    row("batch sampler", by_batches),
    row("IterableDataset", Stream, settings=OWN_SIZE, check=in_order),
    row(
        "DataLoader of an IterableDataset",
        lambda samples: DataLoader(Stream(samples), BATCH),
        check=in_order,
    ),
    row("iterable of batches", Batches, settings=OWN_SIZE, check=in_order),
    row(
        "iterable without an end",
        partial(Batches, has_end=False),
        settings=OWN_SIZE,
        check=in_order,
    ),
    row(
        "list of batches in a DataLoader",
        batch_list,
        settings=OWN_SIZE,
        check=in_order,
    ),
    row(
        "generator without an end",
        lambda samples: iter(Batches(samples, has_end=False)),
        settings=OWN_SIZE,
        check=in_order,
    ),
    row(
        "batches of each worker's own",
        Batches,
        settings=OWN_SIZE,
        train=train_own_batches,
        is_even=False,
    ),
    row(
        "two epochs that workers cannot divide",
        samples=partial(vectors, 31),
        settings={"epochs": 2},
        faults={
            column: "workers whose share of an epoch is larger do not train on more samples"
            for column in SEVERAL
        },
    ),
    row(
        "dicts",
        samples=partial(filled, Named),
        loss=named_squares,
        numbers=by_name,
    ),
    row(
        "nested tuples",
        samples=partial(filled, Nested),
        loss=nested_squares,
        numbers=lambda batch: batch[1].number,
    ),
    row(
        "sequences of unequal lengths",
        partial(DataLoader, batch_size=BATCH, shuffle=True, collate_fn=as_lists),
        samples=partial(filled, Ragged),
        loss=ragged_squares,
        collate=as_lists,
    ),
]
