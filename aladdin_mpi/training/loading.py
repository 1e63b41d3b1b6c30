"""Batches for training, for evaluation and for batch-norm statistics."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from aladdin_mpi.errors import UserError
from aladdin_mpi.training.datasets import MapDataset, known_classes
from aladdin_mpi.training.images import ImageArrays
from aladdin_mpi.training.randomness import AUGMENTATION, sample_keys
from aladdin_mpi.training.sampler import ShardedStream

Batch = tuple[Tensor, Tensor]
Key = tuple[int, int]


class BatchSource:
    """The training batches of one worker.

    An :class:`~.images.ImageArrays` is read in memory; any other data set goes through a
    ``DataLoader``, which prefetches. Either way a sample is augmented as a function of
    (seed, epoch, sample), whatever the number of workers and of loader processes.

    Args:
        dataset: the training set.
        stream: which samples; its seed is that of the augmentation too.
        batch_size: samples to prefetch at a time; what is mostly asked for.
        loader_workers: processes that load ahead; 0 loads when asked. Sets in memory
            need none.
        augment: whether to use the training view.
        start_method: how loader processes are started. The others than ``fork`` import
            the program's main module again; where that starts MPI, they would start as
            a rank that exists already.
    """

    def __init__(
        self,
        dataset: MapDataset,
        stream: ShardedStream,
        batch_size: int,
        loader_workers: int = 0,
        augment: bool = True,
        start_method: str = "fork",
    ) -> None:
        self.dataset = dataset
        self.stream = stream
        self.batch_size = batch_size
        self.loader_workers = loader_workers
        self.augment = augment
        self.start_method = start_method
        self._loaded: Iterator[Batch] | None = None
        self._rest: Batch | None = None

    def next_batch(self, count: int | None = None) -> Batch:
        """Return the next ``count`` samples, by default ``batch_size``.

        Returns:
            Inputs (count, ...), float32 for images, and int64 labels (count,).
        """
        count = self.batch_size if count is None else count
        if isinstance(self.dataset, ImageArrays):
            epochs, indices = self.stream.take(count)
            if self.augment:
                return self.dataset.training_batch(indices, epochs, self.stream.seed)
            return self.dataset.evaluation_batch(indices)
        batch = self._load(count)
        self.stream.position += count
        return batch

    def _load(self, count: int) -> Batch:
        """Take ``count`` samples from what was loaded ahead; keep what is left over."""
        if self._loaded is None:
            self._loaded = self._start()
        inputs, labels = self._rest or next(self._loaded)
        while len(labels) < count:
            more = next(self._loaded)
            inputs, labels = torch.cat([inputs, more[0]]), torch.cat([labels, more[1]])
        left = len(labels) > count
        self._rest = (inputs[count:], labels[count:]) if left else None
        return inputs[:count], labels[:count]

    def _start(self) -> Iterator[Batch]:
        # The loader runs ahead on a stream of its own; ours counts what was consumed.
        keys = _KeyBatches(self.stream.copy(), self.batch_size)
        view = _TrainingView(self.dataset, self.stream.seed, self.augment)
        return _load_in_order(view, keys, self.loader_workers, self.start_method)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in consumed samples; those loaded ahead do not count."""
        return self.stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken. Raises as ``ShardedStream.load_state_dict``."""
        self.close()
        self.stream.load_state_dict(state)

    def close(self) -> None:
        """End the loader processes; the next batch would start them again."""
        self._loaded = None
        self._rest = None


def test_batches(
    dataset: MapDataset, batch_size: int, loader_workers: int = 0, start_method: str = "fork"
) -> Iterator[Batch]:
    """Yield all samples once, in order and without augmentation; the last batch may be short."""
    if not isinstance(dataset, ImageArrays):
        places = range(len(dataset))
        batches = [places[i : i + batch_size] for i in range(0, len(places), batch_size)]
        yield from _load_in_order(dataset, batches, loader_workers, start_method)
        return
    for start in range(0, len(dataset), batch_size):
        yield dataset.evaluation_batch(slice(start, start + batch_size))


def train_batches_for_statistics(
    dataset: MapDataset, batch_size: int, count: int, seed: int
) -> Iterator[Batch]:
    """Yield ``count`` batches of training samples, drawn by ``seed``, without augmentation.

    They serve to estimate batch-norm statistics again. Samples repeat only after all
    have come.
    """
    stream = ShardedStream(len(dataset), 0, 1, seed)
    source = BatchSource(dataset, stream, batch_size, augment=False)
    for _ in range(count):
        yield source.next_batch()


def describe(dataset: MapDataset) -> dict[str, Any]:
    """What the data sets of all workers must have in common: sizes, and the first sample."""
    with _global_generators_kept():
        inputs, labels = _collate([dataset[0]])
    return {
        "length": len(dataset),
        "classes": known_classes(dataset) if not labels.is_floating_point() else None,
        "input": f"{inputs.dtype} {list(inputs.shape[1:])}".removeprefix("torch."),
        "label": f"{labels.dtype} {list(labels.shape[1:])}".removeprefix("torch."),
    }


class _KeyBatches:
    """Endless lists of (epoch, index), for the ``DataLoader`` to hand out."""

    def __init__(self, stream: ShardedStream, batch_size: int) -> None:
        self._stream = stream
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[list[Key]]:
        while True:
            epochs, indices = self._stream.take(self._batch_size)
            yield list(zip(epochs.tolist(), indices.tolist(), strict=True))


class _TrainingView(Dataset[Any]):
    """A data set indexed by (epoch, index), with augmentation decided by them and the seed."""

    def __init__(self, dataset: MapDataset, seed: int, augment: bool) -> None:
        self._dataset = dataset
        self._seed = seed
        self._augmented = getattr(dataset, "augmented", None) if augment else None

    def __getitems__(self, keys: list[Key]) -> list[Any]:
        epochs, indices = torch.tensor(keys).numpy().T
        numbers = sample_keys(self._seed, AUGMENTATION, epochs, indices).tolist()
        with _global_generators_kept():
            return [
                self._sample(index, number)
                for index, number in zip(indices.tolist(), numbers, strict=True)
            ]

    def _sample(self, index: int, number: int) -> Any:
        if self._augmented is not None:
            return self._augmented(index, number)
        _seed_global_generators(number)
        return self._dataset[index]


def _seed_global_generators(key: int) -> None:
    """Seed those that a user's augmentation may draw from: torch's, Python's and numpy's."""
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)


@contextmanager
def _global_generators_kept() -> Iterator[None]:
    """Leave the global generators afterwards as they were before."""
    states = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def _load_in_order(
    dataset: Any, batches: Iterable[Any], loader_workers: int, start_method: str
) -> Iterator[Batch]:
    loader = DataLoader(
        dataset,
        batch_sampler=cast(Any, batches),
        num_workers=loader_workers,
        collate_fn=_collate,
        multiprocessing_context=start_method if loader_workers else None,
        # Without one of its own it would draw from the global generator.
        generator=torch.Generator(),
    )
    return iter(loader)


def _collate(samples: list[Any]) -> Batch:
    batch = default_collate(samples)
    if (
        not isinstance(batch, (tuple, list))
        or len(batch) != 2
        or not all(isinstance(each, Tensor) for each in batch)
    ):
        raise UserError(
            "--dataset: every sample must be (input, label), a tensor or array and an integer; "
            f"the data set gives {type(samples[0]).__name__}"
        )
    return batch[0], batch[1]
