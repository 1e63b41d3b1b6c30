"""Batches for training, for evaluation and for batch-norm statistics."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from aladdin_mpi.data.datasets import MapDataset, known_classes
from aladdin_mpi.data.images import ImageArrays, ImageFiles, Skip, SkippedImages, skips_of
from aladdin_mpi.data.loader_processes import How, LoadAhead, ProcessArguments, Start
from aladdin_mpi.data.sampler import AUGMENTATION, Int64Array, ShardedStream, sample_keys
from aladdin_mpi.errors import UserError
from aladdin_mpi.process.guard import no_exit

Batch = tuple[Tensor, Tensor]
Key = tuple[int, int]
Places = tuple[Int64Array, Int64Array]
"""Epochs and indices of samples."""
Collate = Callable[[list[Any]], Any]
FORKED = Start()
NO_ARGUMENTS = ProcessArguments()


class BatchSource:
    """The training batches of one worker.

    The next batches are loaded meanwhile, by processes of a ``DataLoader`` or by a thread
    (:mod:`.load_ahead`). Either way a sample is augmented as a function of (seed, epoch,
    sample), whatever the number of workers and of loader processes.

    Args:
        dataset: the training set.
        stream: which samples; its seed is that of the augmentation too.
        batch_size: samples to prefetch at a time; what is mostly asked for.
        loader_workers: processes that load ahead. Sets in memory need none.
        augment: whether to use the training view.
        start: see :mod:`.loader_processes`.
        collate: makes a batch of a list of samples; None: of (input, label) pairs.
        ahead: without processes, a thread may load the next batches.
        arguments: of a user's DataLoader, for the processes.
    """

    def __init__(
        self,
        dataset: MapDataset,
        stream: ShardedStream,
        batch_size: int,
        loader_workers: int = 0,
        augment: bool = True,
        start: Start = FORKED,
        collate: Collate | None = None,
        ahead: bool = True,
        arguments: ProcessArguments = NO_ARGUMENTS,
    ) -> None:
        self.dataset = dataset
        self.stream = stream
        self.collate = collate or _collate
        self.arguments = arguments
        # A collate_fn of the user's own is given single samples.
        is_default = collate is None or collate is default_collate
        self._arrays = dataset if isinstance(dataset, ImageArrays) and is_default else None
        self.batch_size = batch_size
        self.loader_workers = loader_workers
        self.augment = augment
        self.start = start
        self._view = TrainingView(dataset, stream.seed, augment)
        self._ahead = ahead
        self.draws = False
        """See :class:`~.load_ahead.Loader`."""
        self._loaded: Iterator[Any] | None = None

    def next_batch(self, count: int | None = None) -> Any:
        """Return the next ``count`` samples, by default ``batch_size``.

        Returns:
            What ``collate`` makes of them; of pairs inputs (count, ...), float32 for images, and
            int64 labels (count,).
        """
        count = self.batch_size if count is None else count
        if count != self.batch_size:
            # A part of a round, at the end of a segment: what was loaded ahead is cut otherwise.
            self.close()
            return self.load(self.stream.take(count), How.ALONE)
        if self._loaded is None:
            self._loaded = self._start()
        batch = next(self._loaded)
        self.stream.position += count
        return batch

    def _start(self) -> Iterator[Any]:
        # The loader runs ahead on a stream of its own; ours counts what was consumed.
        stream, size = self.stream.copy(), self.batch_size
        if self.loader_workers and self._arrays is None:
            keys = _KeyBatches(stream, size)
            processes = self.loader_workers, self.start
            return load_in_order(self._view, keys, *processes, self.collate, self.arguments)
        taken = (stream.take(size) for _ in itertools.count())
        if self._ahead:
            return LoadAhead(taken, self)
        return (self.load(places, How.ALONE) for places in taken)

    def load(self, places: Places, how: How) -> Any:
        """See :class:`~.load_ahead.Loader`; ``places`` are the samples' epochs and indices."""
        if self._arrays is not None:
            epochs, indices = places
            if self.augment:
                return self._arrays.training_batch(indices, epochs, self.stream.seed)
            return self._arrays.evaluation_batch(indices)
        samples = self._view.samples(_keys(places), how)
        if how is not How.TRIAL:
            return self.collate(samples)
        before = _positions()
        batch = self.collate(samples)
        self.draws = self.draws or self._view.draws or before != _positions()
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position in consumed samples; those loaded ahead do not count."""
        return self.stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken. Raises as ``ShardedStream.load_state_dict``."""
        self.close()
        self.stream.load_state_dict(state)

    def close(self) -> None:
        """End what loads ahead; the next batch would start it again."""
        if isinstance(self._loaded, LoadAhead):
            self._loaded.close()
        self._loaded = None


def test_batches(
    dataset: MapDataset,
    batch_size: int,
    loader_workers: int = 0,
    start: Start = FORKED,
    part: int = 0,
    parts: int = 1,
) -> Iterator[Batch]:
    """Yield all samples once, in order and without augmentation; the last batch may be short.

    Of ``parts`` equal parts only the one that is asked for. Images that are skipped are left out.
    """
    first, end = len(dataset) * part // parts, len(dataset) * (part + 1) // parts
    if not isinstance(dataset, ImageArrays):
        batches = [range(i, min(i + batch_size, end)) for i in range(first, end, batch_size)]
        if isinstance(dataset, ImageFiles):
            yield from _readable_batches(dataset, batches, loader_workers, start)
        else:
            yield from load_in_order(dataset, batches, loader_workers, start)
        return
    for start_of_batch in range(first, end, batch_size):
        yield dataset.evaluation_batch(slice(start_of_batch, min(start_of_batch + batch_size, end)))


def _readable_batches(
    dataset: ImageFiles, batches: Iterable[Any], loader_workers: int, start: Start
) -> Iterator[Batch]:
    view = _ReadableView(dataset)
    for batch in load_in_order(view, batches, loader_workers, start, _collate_if_any):
        if batch is not None:
            yield batch


def train_batches_for_statistics(
    dataset: MapDataset, batch_size: int, count: int, seed: int
) -> Iterator[Batch]:
    """Yield ``count`` batches of training samples, drawn by ``seed``, without augmentation.

    They serve to estimate batch-norm statistics again. Samples repeat only after all
    have come.
    """
    stream = ShardedStream(len(dataset), 0, 1, seed)
    places = (stream.take(batch_size)[1] for _ in range(count))
    if isinstance(dataset, ImageArrays):
        yield from map(dataset.evaluation_batch, places)
    else:
        # The global generators are left alone: a thread may be drawing from them.
        yield from load_in_order(dataset, (indices.tolist() for indices in places), 0)


def describe(dataset: MapDataset) -> dict[str, Any]:
    """What the data sets of all workers must have in common: sizes, and the first sample."""
    with global_generators_kept():
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
            yield _keys(self._stream.take(self._batch_size))


def _keys(places: Places) -> list[Key]:
    epochs, indices = places
    return list(zip(epochs.tolist(), indices.tolist(), strict=True))


class TrainingView(Dataset[Any]):
    """A data set indexed by (epoch, index), with augmentation decided by them and the seed.

    ``draws``: see :class:`~.load_ahead.Loader`.
    """

    def __init__(self, dataset: MapDataset, seed: int, augment: bool) -> None:
        self.dataset = dataset
        self.skipped = skips_of(dataset)
        self._seed = seed
        self._augmented = getattr(dataset, "augmented", None) if augment else None
        self.draws = False

    def __getitems__(self, keys: list[Key]) -> list[Any]:
        return self.samples(keys)

    def samples(self, keys: list[Key], how: How = How.ALONE) -> list[Any]:
        """Those of ``keys``; but for BESIDE the global generators are kept, and seeded for each."""
        epochs, indices = torch.tensor(keys).numpy().T
        numbers = sample_keys(self._seed, AUGMENTATION, epochs, indices).tolist()
        if how is How.BESIDE:
            return list(map(self._sample, indices.tolist(), numbers))
        seeded = self._watched if how is How.TRIAL else self._seeded
        with global_generators_kept():
            return list(map(seeded, indices.tolist(), numbers))

    def _sample(self, index: int, number: int) -> Any:
        if self._augmented is not None:
            return self._augmented(index, number)
        return self.dataset[index]

    def _seeded(self, index: int, number: int) -> Any:
        if self._augmented is None:
            seed_global_generators(number)
        return self._sample(index, number)

    def _watched(self, index: int, number: int) -> Any:
        if self._augmented is None:
            seed_global_generators(number)
        before = _positions()
        sample = self._sample(index, number)
        self.draws = self.draws or before != _positions()
        return sample


class _ReadableView(Dataset[Any]):
    """The images of a folder, less those that are skipped."""

    def __init__(self, dataset: ImageFiles) -> None:
        self._dataset = dataset
        self.skipped = dataset.skipped

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return self._dataset.readable(indices)


def seed_global_generators(key: int) -> None:
    """Seed those that a user's augmentation may draw from: torch's, Python's and numpy's."""
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)


def _positions() -> tuple[bytes, Any, Any]:
    """How far the global generators are."""
    mine = bytes(torch.default_generator.get_state().numpy())
    _, _, *position = np.random.get_state()
    return mine, random.getstate(), position


@contextmanager
def global_generators_kept() -> Iterator[None]:
    """Leave the global generators afterwards as they were before."""
    states = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def load_in_order(
    dataset: Any,
    batches: Iterable[Any],
    loader_workers: int,
    start: Start = FORKED,
    collate: Collate | None = None,
    arguments: ProcessArguments = NO_ARGUMENTS,
) -> Iterator[Any]:
    """Batches of the samples that ``batches`` lists, loaded ahead by processes if there are any.

    A UserError in such a process is raised here as it was there, and what ``dataset`` notes as
    skipped there is noted here.
    """

    def loader(method: str | None) -> DataLoader[_Loaded]:
        return DataLoader(
            _Loading(dataset, collate or _collate),
            batch_sampler=cast(Any, batches),
            num_workers=loader_workers,
            collate_fn=_as_it_is,
            multiprocessing_context=method,
            # Without one of its own it would draw from the global generator.
            generator=torch.Generator().manual_seed(arguments.seed),
            timeout=arguments.timeout,
            prefetch_factor=arguments.prefetch_factor,
            worker_init_fn=_ProcessStart(dataset, arguments.worker_init_fn),
        )

    loaded = start.start(loader) if loader_workers else iter(loader(None))
    return _unpacked(loaded, skips_of(dataset))


class _ProcessStart:
    """Begins a loader process: it knows the user's data set, not what the run wraps it in."""

    def __init__(self, dataset: Any, own: Callable[[int], object] | None) -> None:
        self._dataset = dataset.dataset if isinstance(dataset, TrainingView) else dataset
        self._own = own

    def __call__(self, number: int) -> None:
        # A frozen object, as the user is not to change it.
        object.__setattr__(get_worker_info(), "dataset", self._dataset)
        if self._own is not None:
            self._own(number)


class _Loaded(NamedTuple):
    """What a loader process sends for a batch."""

    batch: Any
    skipped: list[Skip]
    problem: str | None = None


class _Loading(Dataset[Any]):
    """A data set whose lists of samples are batches already."""

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self._dataset = dataset
        self._collate = collate
        self._skipped = skips_of(dataset)

    def __getitems__(self, keys: Any) -> _Loaded:
        try:
            with no_exit():
                batch, problem = self._collate(self._samples(keys)), None
        except UserError as error:
            batch, problem = None, str(error)
        return _Loaded(batch, self._skipped.take() if self._skipped else [], problem)

    def _samples(self, keys: Any) -> list[Any]:
        at_once = getattr(self._dataset, "__getitems__", None)
        if at_once is not None:
            samples: list[Any] = at_once(keys)
            return samples
        return [self._dataset[key] for key in keys]


def _as_it_is(loaded: Any) -> Any:
    return loaded


def _unpacked(batches: Iterator[_Loaded], skipped: SkippedImages | None) -> Iterator[Any]:
    for loaded in batches:
        for path, why in loaded.skipped:
            if skipped is not None:
                skipped.add(path, why)
        if loaded.problem is not None:
            raise UserError(loaded.problem)
        yield loaded.batch


def _collate_if_any(samples: list[Any]) -> Batch | None:
    return _collate(samples) if samples else None


def _collate(samples: list[Any]) -> Batch:
    try:
        batch = default_collate(samples)
    except (TypeError, RuntimeError) as error:  # of no tensors, and of unequal ones
        raise UserError(
            "--dataset: expected samples (input, label) that can be put together to a batch, with "
            f"inputs of one shape, got others ({error}); change what the data set gives"
        ) from error
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
