"""Batches for training, for evaluation and for batch-norm statistics."""

from __future__ import annotations

import itertools
import operator
import random
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from copy import copy
from enum import Enum
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    default_collate,
    get_worker_info,
)

from aladdin_mpi.data.datasets import MapDataset, known_classes
from aladdin_mpi.data.images import ImageArrays, ImageFiles, Skip, SkippedImages, skips_of
from aladdin_mpi.data.loader_processes import Start
from aladdin_mpi.data.sampler import (
    AUGMENTATION,
    Int64Array,
    ShardedStream,
    order_key,
    sample_keys,
)
from aladdin_mpi.errors import UserError
from aladdin_mpi.process.guard import no_exit

Batch = tuple[Tensor, Tensor]
Key = tuple[int, Any]
Places = tuple[Int64Array, Int64Array]
"""Epochs and indices of samples."""
Collate = Callable[[list[Any]], Any]
FORKED = Start()

AHEAD = 2
"""Batches that a thread loads ahead: one more than needed, for varying loading times."""
TRIALS = 3
"""Number of first batches that are loaded on request, to measure their loading time."""
THREAD = "aladdin_mpi loader"
LARGEST_SEED = 0x7FFFFFFFFFFFFFFF
"""Of ``manual_seed()``."""
LEAST_SECONDS = 0.002
"""Loading time of a batch above which a thread is worthwhile."""


class LoadMode(Enum):
    """The circumstances in which a batch is loaded."""

    ALONE = "alone"  # while the training waits
    TRIAL = "trial"  # like ALONE, and recording whether samples draw random numbers
    CONCURRENT = "concurrent"  # during training, in another thread


class BatchSource:
    """The training batches of one worker.

    The next batches are loaded during training, by processes of a ``DataLoader`` or by a thread.
    The augmentation of a sample is a function of (seed, epoch, sample), independent of the number
    of workers and loader processes.

    Args:
        dataset: the training set.
        stream: the samples; its seed also determines the augmentation.
        batch_size: samples to prefetch at a time, the usual size of a batch.
        loader_workers: number of processes that load ahead; datasets in memory need none.
        start: see :mod:`.loader_processes`.
        collate: makes a batch of a list of samples; None for (input, label) pairs.
        ahead: whether, without processes, a thread may load the next batches.
        arguments: for :func:`load_in_order`.
    """

    def __init__(
        self,
        dataset: MapDataset,
        stream: ShardedStream,
        batch_size: int,
        loader_workers: int = 0,
        start: Start = FORKED,
        collate: Collate | None = None,
        ahead: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.stream = stream
        self._arguments = arguments or {}
        # A user's collate_fn receives single samples.
        is_default = collate is None or collate is default_collate
        self._arrays = dataset if isinstance(dataset, ImageArrays) and is_default else None
        self._batch_size = batch_size
        self._loader_workers = loader_workers
        self._start = start
        self._loader = TrainingLoader(dataset, stream.seed, collate or _collate)
        self._ahead = ahead
        self._loaded: Iterator[Any] | None = None

    def next_batch(self, count: int | None = None) -> Any:
        """Return the next ``count`` samples, by default ``batch_size``.

        Returns:
            The result of ``collate``; for pairs, inputs (count, ...), float32 for images, and
            int64 labels (count,).
        """
        count = self._batch_size if count is None else count
        if count != self._batch_size:
            # At the end of a segment, a part of a round: batches loaded ahead have another size.
            self.close()
            return self._load(self.stream.take(count))
        if self._loaded is None:
            self._loaded = self._begin()
        batch = next(self._loaded)
        self.stream.position += count
        return batch

    def _begin(self) -> Iterator[Any]:
        # Loading ahead uses a copy of the stream; self.stream counts the samples returned.
        stream, size = copy(self.stream), self._batch_size
        taken = (stream.take(size) for _ in itertools.count())
        if self._loader_workers and self._arrays is None:
            processes = self._loader_workers, self._start
            return load_in_order(
                self._loader,
                map(_keys, taken),
                *processes,
                restart=self.stream.position,
                **self._arguments,
            )
        return self._load_ahead(taken) if self._ahead else map(self._load, taken)

    def _load_ahead(self, taken: Iterator[Places]) -> Iterator[Any]:
        """Yield the batches of ``taken``, loaded by a thread if that is safe and worthwhile.

        Data that draw from the process's global generators cannot be loaded during training, which
        uses these generators.
        """
        seconds: list[float] = []
        for trial in range(TRIALS):
            start = perf_counter()
            batch = self._load(next(taken), LoadMode.TRIAL)
            seconds.append(perf_counter() - start)
            if trial < TRIALS - 1:
                yield batch
        if min(seconds) < LEAST_SECONDS or self._loader.draws:
            yield batch
            yield from map(self._load, taken)
        # The thread uses one core, the others compute. torch keeps the number per thread.
        thread = ThreadPoolExecutor(1, THREAD, torch.set_num_threads, (1,))
        loading = (thread.submit(self._load, places, LoadMode.CONCURRENT) for places in taken)
        coming = deque(itertools.islice(loading, AHEAD))
        try:
            while True:
                yield batch
                batch = coming.popleft().result()
                coming.append(next(loading))
        finally:
            thread.shutdown(wait=False, cancel_futures=True)

    def _load(self, places: Places, mode: LoadMode = LoadMode.ALONE) -> Any:
        if self._arrays is not None:
            epochs, indices = places
            return self._arrays.training_batch(indices, epochs, self.stream.seed)
        return self._loader(_keys(places), mode)

    def close(self) -> None:
        """Stop loading ahead; the next batch starts it again."""
        if isinstance(self._loaded, Generator):
            self._loaded.close()
        self._loaded = None


def test_batches(
    dataset: MapDataset, batch_size: int, part: int = 0, parts: int = 1
) -> Iterator[Batch]:
    """Yield one of ``parts`` equal parts of the samples, in order and without augmentation.

    Skipped images are left out; the last batch may be short.
    """
    end = len(dataset) * (part + 1) // parts
    for first in range(len(dataset) * part // parts, end, batch_size):
        last = min(first + batch_size, end)
        if isinstance(dataset, ImageArrays):
            yield dataset.evaluation_batch(slice(first, last))
            continue
        if isinstance(dataset, ImageFiles):
            samples: list[Any] = dataset.readable(range(first, last))
        else:
            samples = _samples(dataset, range(first, last))
        if samples:
            yield _collate(samples)


def train_batches_for_statistics(
    dataset: MapDataset, batch_size: int, count: int, seed: int
) -> Iterator[Batch]:
    """Yield ``count`` batches of training samples, selected by ``seed``, without augmentation.

    They serve to recalibrate batch norm. No sample repeats before all have been used. The global
    generators are not changed, as another thread may use them.
    """
    stream = ShardedStream(len(dataset), 0, 1, seed)
    for _ in range(count):
        indices = stream.take(batch_size)[1]
        if isinstance(dataset, ImageArrays):
            yield dataset.evaluation_batch(indices)
        else:
            yield _collate(_samples(dataset, indices.tolist()))


def describe(dataset: MapDataset) -> dict[str, Any]:
    """Return the facts that all workers' data must share: sizes, and types of the first sample."""
    with global_generators_kept():
        inputs, labels = _collate([dataset[0]])
    return {
        "length": len(dataset),
        "classes": known_classes(dataset) if not labels.is_floating_point() else None,
        "input": f"{inputs.dtype} {list(inputs.shape[1:])}".removeprefix("torch."),
        "label": f"{labels.dtype} {list(labels.shape[1:])}".removeprefix("torch."),
    }


def _keys(places: Places) -> list[Key]:
    epochs, indices = places
    return list(zip(epochs.tolist(), indices.tolist(), strict=True))


def parts_of(dataset: Any) -> Iterator[Any]:
    """Yield a data set, and those of which torch has made it."""
    yield dataset
    inner = [dataset.dataset] if isinstance(dataset, Subset) else []
    for each in dataset.datasets if isinstance(dataset, ConcatDataset) else inner:
        yield from parts_of(each)


def takers_of_epoch(*objects: Any) -> list[Any]:
    """Return the objects that have a ``set_epoch()``, each once."""
    takers = (each for each in objects if callable(getattr(each, "set_epoch", None)))
    return list({id(each): each for each in takers}.values())


class TrainingLoader:
    """Loader of batches by (epoch, index), with augmentation determined by these and the seed.

    Before the first sample of an epoch, ``set_epoch()`` of the data set, if any, is called in the
    process that loads the sample.

    Args:
        dataset: the data set.
        seed: of the augmentation.
        collate: makes a batch of a list of samples.
        is_training: otherwise samples are loaded for evaluation, and epochs are not set.

    Attributes:
        draws: whether a trial batch has drawn from the process's global generators, or a batch of
            another epoch may.
    """

    def __init__(
        self, dataset: MapDataset, seed: int, collate: Collate, is_training: bool = True
    ) -> None:
        self.dataset = dataset
        self._seed = seed
        self._collate = collate
        self._augmented = getattr(dataset, "augmented", None) if is_training else None
        self._epoch = -1
        self._takes_epoch = takers_of_epoch(*parts_of(dataset)) if is_training else []
        self.draws = bool(self._takes_epoch)

    def __call__(self, keys: list[Key], mode: LoadMode = LoadMode.ALONE) -> Any:
        """Load a batch; unless CONCURRENT, seed the global generators for each sample."""
        epochs = np.array([epoch for epoch, _ in keys], dtype=np.int64)
        indices = [_plain(index) for _, index in keys]
        places = np.array([_number_of(index) for index in indices], dtype=np.int64)
        numbers = sample_keys(self._seed, AUGMENTATION, epochs, places).tolist()
        with nullcontext() if mode is LoadMode.CONCURRENT else global_generators_kept():
            samples = [
                self._sample(epoch, index, number, mode)
                for epoch, index, number in zip(epochs.tolist(), indices, numbers, strict=True)
            ]
        before = _positions() if mode is LoadMode.TRIAL else None
        batch = self._collate(samples)
        self.draws |= before is not None and before != _positions()
        return batch

    def _sample(self, epoch: int, index: Any, number: int, mode: LoadMode) -> Any:
        if epoch != self._epoch:
            self._epoch = epoch
            for each in self._takes_epoch:
                each.set_epoch(epoch)
        if self._augmented is None and mode is not LoadMode.CONCURRENT:
            seed_global_generators(number)
        before = _positions() if mode is LoadMode.TRIAL else None
        augmented = self._augmented
        sample = self.dataset[index] if augmented is None else augmented(index, number)
        self.draws |= before is not None and before != _positions()
        return sample


def _plain(index: Any) -> Any:
    """Return a tensor's or NumPy's integer as an int, and other keys of samples as they are."""
    try:
        return operator.index(index)
    except TypeError:
        return index


def _number_of(index: Any) -> int:
    """Return a number for the key of a sample, which seeds its augmentation."""
    return index if isinstance(index, int) else zlib.crc32(repr(index).encode())


def seed_global_generators(key: int) -> None:
    """Seed torch's, Python's and numpy's global generators, which a user's augmentation may use."""
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)


def _positions() -> tuple[bytes, Any, Any]:
    """Return the states of the global generators, for comparison."""
    mine = bytes(torch.default_generator.get_state().numpy())
    _, _, *position = np.random.get_state()
    return mine, random.getstate(), position


@contextmanager
def global_generators_kept() -> Iterator[None]:
    """Restore the states of the global generators after the block."""
    states = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def load_in_order(
    load: Callable[[Any], Any],
    keys: Iterable[Any],
    loader_workers: int,
    start: Start = FORKED,
    *,
    timeout: float = 0,
    prefetch_factor: int | None = None,
    worker_init_fn: Callable[[int], object] | None = None,
    seed: int = 0,
    restart: int = 0,
) -> Iterator[Any]:
    """Yield ``load(key)`` for each of ``keys``, loaded ahead by processes, if any.

    A UserError in such a process is raised here again, and images that the loader's ``dataset``
    records as skipped there are recorded here.

    Args:
        load: makes a batch.
        keys: arguments of ``load``.
        loader_workers: number of processes.
        start: their start method.
        timeout: longest loading time of a batch in seconds; 0 for no limit.
        prefetch_factor: batches that each process loads ahead; None for torch's default.
        worker_init_fn: called in each process with its number before loading.
        seed: of the processes' initial random states, which differ among processes.
        restart: differs each time that loading is started again, so that random states do not
            repeat; 0: for the first time.
    """
    own_seed = (order_key(seed, restart) if restart else seed) & LARGEST_SEED
    dataset = getattr(load, "dataset", None)

    def loader(method: str | None) -> DataLoader[_Loaded]:
        return DataLoader(
            _Loading(load, dataset),
            batch_sampler=cast(Any, keys),
            num_workers=loader_workers,
            collate_fn=_as_it_is,
            multiprocessing_context=method,
            # Without a generator, it would draw from the global one.
            generator=torch.Generator().manual_seed(own_seed),
            timeout=timeout,
            prefetch_factor=prefetch_factor,
            worker_init_fn=partial(_begin_process, dataset, worker_init_fn),
        )

    loaded = start.start(loader) if loader_workers else iter(loader(None))
    return _unpacked(loaded, skips_of(dataset))


def _begin_process(dataset: Any, own: Callable[[int], object] | None, number: int) -> None:
    # Show the user's dataset instead of _Loading; the object is frozen against changes by users.
    object.__setattr__(get_worker_info(), "dataset", dataset)
    if own is not None:
        own(number)


class _Loaded(NamedTuple):
    """A loader process's message about a batch."""

    batch: Any
    skipped: list[Skip]
    problem: str | None = None


class _Loading(Dataset[Any]):
    """A dataset whose lists of samples are batches already."""

    def __init__(self, load: Callable[[Any], Any], dataset: Any) -> None:
        self._load = load
        self._skipped = skips_of(dataset)

    def __getitems__(self, keys: Any) -> _Loaded:
        batch, problem = None, None
        try:
            with no_exit():
                batch = self._load(keys)
        except UserError as error:
            problem = str(error)
        return _Loaded(batch, self._skipped.take() if self._skipped else [], problem)


def _samples(dataset: Any, keys: Iterable[int]) -> list[Any]:
    at_once = getattr(dataset, "__getitems__", None)
    return [dataset[key] for key in keys] if at_once is None else at_once(keys)


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


def _collate(samples: list[Any]) -> Batch:
    try:
        batch = default_collate(samples)
    except (TypeError, RuntimeError) as error:  # not tensors, or tensors of different shapes
        raise UserError(
            "--dataset: expected samples (input, label) that can be collated into a batch, with "
            f"inputs of one shape, got others ({error}); change what the data set returns"
        ) from error
    if (
        not isinstance(batch, (tuple, list))
        or len(batch) != 2
        or not all(isinstance(each, Tensor) for each in batch)
    ):
        raise UserError(
            "--dataset: expected samples (input, label), a tensor or array and an integer, got "
            f"{type(samples[0]).__name__}; change what the data set returns"
        )
    return batch[0], batch[1]
