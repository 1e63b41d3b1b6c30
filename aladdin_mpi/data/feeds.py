"""What ``run.batches()`` may be given, and how it is dealt to the workers.

Samples with numbers, whatever their order, are dealt to the sample, and a run that goes on finds
its place among them. What can only be read from its beginning is dealt by whole batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch.utils._pytree import tree_flatten
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from aladdin_mpi.data.datasets import DatasetPair, MapDataset
from aladdin_mpi.data.images import ImageArrays
from aladdin_mpi.data.loader_processes import Start
from aladdin_mpi.data.loading import (
    FORKED,
    BatchSource,
    Collate,
    TrainingView,
    global_generators_kept,
    load_in_order,
    seed_global_generators,
)
from aladdin_mpi.data.loading import describe as describe_pairs
from aladdin_mpi.data.randomness import SHUFFLING, sample_keys
from aladdin_mpi.data.sampler import Int64Array, Period, ShardedStream
from aladdin_mpi.data.shards import ShardImages
from aladdin_mpi.data.skipped import SkippedImages, skips_of
from aladdin_mpi.errors import UserError

BEGINS_ANEW = "data that can only be read in order begin anew, not where the run had come to"


class Source(Protocol):
    """One worker's batches."""

    def next_batch(self, count: int) -> Any:
        """A batch of ``count`` samples; where they come in batches, the next of these."""

    def close(self) -> None:
        """End what loads ahead."""


@dataclass(frozen=True)
class Share:
    """Whose batches a feed is asked for.

    Attributes:
        worker: its number, of ``workers``.
        seed: of the run.
        batch_size: samples of a batch.
        done: samples that it has had in this period.
        processes: that load ahead.
        start: how they are started.
        ahead: without processes, a thread may load the next batches.
        past: periods of the run with other numbers of workers.
    """

    worker: int
    workers: int
    seed: int
    batch_size: int
    done: int = 0
    processes: int = 0
    start: Start = FORKED
    ahead: bool = False
    past: Sequence[Period] = ()


class Feed(ABC):
    """Data for all workers.

    Attributes:
        batch_size: samples of a batch; None: as the run says.
        loader_workers: processes that load ahead; None: as the run says.
        caveat: what a run that goes on does not do as it would have without a break.
        skipped: where the data set notes images that it skips, if it does.
    """

    batch_size: int | None = None
    loader_workers: int | None = None
    caveat: str = ""
    skipped: SkippedImages | None = None

    @abstractmethod
    def length(self, batch_size: int) -> int | None:
        """Samples of an epoch; None: nobody knows."""

    def facts(self) -> dict[str, Any]:
        """What the data of all workers must have in common."""
        return {}

    @abstractmethod
    def source(self, share: Share) -> Source:
        """The batches of one worker."""


class SampleFeed(Feed):
    """Samples by number, in an order by the run's seed, by a sampler, or as they lie.

    Args:
        loader: has the data set in it, with what it makes of it.
        pairs: samples are (input, label), for the built-in training.
    """

    def __init__(
        self, dataset: Any, loader: DataLoader[Any] | None = None, pairs: bool = False
    ) -> None:
        self._dataset = dataset
        self.skipped = skips_of(dataset)
        self._pairs = pairs or isinstance(dataset, ImageArrays)
        self._collate: Collate | None = None if pairs else default_collate
        self._sampler: Any = None
        if loader is not None:
            self.batch_size, self.loader_workers = loader.batch_size, loader.num_workers
            self._collate = loader.collate_fn
            self._sampler = None if _shuffles(loader.sampler) else loader.sampler

    def length(self, batch_size: int) -> int:
        """Samples of an epoch."""
        return len(self._dataset if self._sampler is None else self._sampler)

    def facts(self) -> dict[str, Any]:
        """Sizes, and what the first sample is made of."""
        if self._pairs:
            return describe_pairs(self._dataset)
        with global_generators_kept():
            return {"length": len(self._dataset), "sample": _outline(self._dataset[0])}

    def source(self, share: Share) -> Source:
        """See :meth:`Feed.source`."""
        size = share.batch_size
        order = None if self._sampler is None else _order(self._sampler, share.seed)
        if order is None and isinstance(self._dataset, ShardImages):
            order = _as_it_lies(self._dataset, share)
        stream = ShardedStream(
            self.length(size), share.worker, share.workers, share.seed, order, share.past
        )
        stream.position = share.done
        return BatchSource(
            self._dataset,
            stream,
            size,
            share.processes,
            start=share.start,
            collate=self._collate,
            ahead=share.ahead,
        )


class BatchListFeed(Feed):
    """Batches that a batch sampler lists; each counts as ``batch_size`` samples."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self.loader_workers = loader.num_workers
        size = getattr(loader.batch_sampler, "batch_size", None)
        self.batch_size = size if isinstance(size, int) else None

    def length(self, batch_size: int) -> int:
        """Samples of an epoch, by count."""
        return len(self._loader) * batch_size

    def facts(self) -> dict[str, Any]:
        """See :class:`SampleFeed`."""
        return SampleFeed(self._loader.dataset).facts()

    def source(self, share: Share) -> Source:
        """See :meth:`Feed.source`."""
        count, seed = len(self._loader), share.seed
        by_batch = [_by_batch(period, share.batch_size) for period in share.past]
        numbers = ShardedStream(
            count, share.worker, share.workers, seed, lambda epoch: np.arange(count), by_batch
        )
        numbers.position = share.done // share.batch_size
        keys = _listed(_epochs_of(self._loader.batch_sampler, seed), numbers)
        view = TrainingView(cast(MapDataset, self._loader.dataset), seed, augment=True)
        collate = self._loader.collate_fn
        return _Batches(load_in_order(view, keys, share.processes, share.start, collate))


class StreamFeed(Feed):
    """Batches that can only be read in order.

    Args:
        batches: begins anew whenever it is iterated; a batch counts as ``batch_size`` samples.
        sharded: each worker's are its own; otherwise worker w of n takes the w-th of every n.
    """

    caveat = BEGINS_ANEW

    def __init__(self, batches: Iterable[Any], sharded: bool) -> None:
        self._batches = batches
        self._sharded = sharded
        if isinstance(batches, DataLoader):
            self.batch_size = batches.batch_size

    def length(self, batch_size: int) -> int | None:
        """Samples of an epoch, by count, if it says how many batches it has."""
        try:
            return len(cast(Sized, self._batches)) * batch_size
        except TypeError:
            return None

    def source(self, share: Share) -> Source:
        """See :meth:`Feed.source`."""
        step, first = (1, 0) if self._sharded else (share.workers, share.worker)
        return _Batches(_every(self._batches, first, step))


class _Batches:
    """A source that has batches of its own size."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def next_batch(self, count: int) -> Any:
        """The next one."""
        return next(self._batches)

    def close(self) -> None:
        """See :class:`Source`."""
        self._batches = iter(())  # which ends processes that load


def feed_of(data: Any, sharded: bool, batch_size: int) -> Feed:
    """How ``data`` are dealt.

    Args:
        data: a data set, a DataLoader, or something that gives batches whenever it is iterated.
        sharded: an iterable gives each worker its own already.
        batch_size: for an iterable data set, whose samples are put together.

    Raises:
        UserError: it is none of them, or is dealt to ranks already.
    """
    if isinstance(data, DataLoader):
        return _of_loader(data, sharded)
    if isinstance(data, IterableDataset):
        return StreamFeed(DataLoader(data, batch_size=batch_size), sharded)
    if (
        isinstance(data, Sized)
        and hasattr(data, "__getitem__")
        and not isinstance(data, (DatasetPair, dict, str))
    ):
        return SampleFeed(data)
    if hasattr(data, "__iter__") and not isinstance(data, (Iterator, DatasetPair, dict, str)):
        return StreamFeed(data, sharded)
    hint = ""
    if isinstance(data, DatasetPair):
        hint = "; give its .train"
    elif isinstance(data, Iterator):
        hint = ", which cannot begin anew for the next epoch; give what it was made of"
    raise UserError(
        "batches(): expected a data set, a DataLoader, or an iterable of batches, got "
        f"{type(data).__name__}{hint}"
    )


def _of_loader(loader: DataLoader[Any], sharded: bool) -> Feed:
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        return StreamFeed(loader, sharded)
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(each, DistributedSampler) for each in samplers):
        raise UserError(
            "batches(): expected a DataLoader for the whole data set, got one with a "
            "DistributedSampler; leave the sampler out: the run deals the samples to the workers"
        )
    if type(loader.batch_sampler) is BatchSampler and loader.batch_size is not None:
        return SampleFeed(loader.dataset, loader)
    return BatchListFeed(loader)


def _by_batch(period: Period, batch_size: int) -> Period:
    """A period of samples in batches."""
    return Period(tuple(None if n is None else n // batch_size for n in period.taken))


def _shuffles(sampler: Any) -> bool:
    """Whether it stands for ``shuffle=True``, in the order of whose choice the run is free."""
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and (sampler.num_samples == len(sampler.data_source))
    )


def _order(sampler: Any, seed: int) -> Callable[[int], Int64Array] | None:
    if type(sampler) is SequentialSampler:
        indices = np.arange(len(sampler))
        return lambda epoch: indices
    epochs = _epochs_of(sampler, seed)
    return lambda epoch: np.asarray(epochs(epoch), dtype=np.int64)


def _as_it_lies(dataset: ShardImages, share: Share) -> Callable[[int], Int64Array]:
    """Each worker reads shards of its own."""
    if share.past:
        raise UserError(
            "--allow-resize: expected data whose order does not depend on the number of workers, "
            "got shards; resume with as many workers as before"
        )
    return lambda epoch: dataset.reading_order(epoch, share.workers, share.seed)


def _epochs_of(sampler: Any, seed: int) -> Callable[[int], list[Any]]:
    """What a sampler gives in an epoch: the same for all workers, whatever it draws from."""
    kept: dict[int, list[Any]] = {}

    def of(epoch: int) -> list[Any]:
        if epoch not in kept:
            key = int(sample_keys(seed, SHUFFLING, epoch, np.zeros(1, dtype=np.int64))[0])
            with global_generators_kept():
                seed_global_generators(key)
                for owner in (sampler, getattr(sampler, "sampler", sampler)):
                    if isinstance(getattr(owner, "generator", None), torch.Generator):
                        owner.generator.manual_seed(key & 0x7FFFFFFFFFFFFFFF)
                    if hasattr(owner, "set_epoch"):
                        owner.set_epoch(epoch)
                found = list(sampler)
            kept.clear()
            kept[epoch] = found
        return kept[epoch]

    return of


def _listed(
    epochs: Callable[[int], list[Any]], numbers: ShardedStream
) -> Iterator[list[tuple[int, int]]]:
    """The (epoch, index) pairs of one worker's batches, endlessly."""
    while True:
        (epoch,), (number,) = (each.tolist() for each in numbers.take(1))
        batches = epochs(epoch)
        if number < len(batches):  # some samplers have fewer batches in some epochs
            yield [(epoch, index) for index in batches[number]]


def _every(batches: Iterable[Any], first: int, step: int) -> Iterator[Any]:
    """Each ``step``-th batch from number ``first`` on, epoch after epoch."""
    epoch = 0
    while True:
        dataset = getattr(batches, "dataset", batches)
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        number = -1
        for number, batch in enumerate(batches):
            if number % step == first:
                yield batch
        if number < first:
            raise UserError(
                f"batches(): expected at least {step} batches in an epoch, one for each worker, "
                f"got {number + 1}; give more data, smaller batches or fewer workers, or "
                "sharded=True for data that are each worker's own"
            )
        epoch += 1


def _outline(sample: Any) -> str:
    """Of what a sample is made: the same for all workers; lengths may differ."""
    leaves, spec = tree_flatten(sample)
    kinds = [
        f"{leaf.dtype}".removeprefix("torch.") + f" {leaf.dim()}-D"
        if isinstance(leaf, torch.Tensor)
        else type(leaf).__name__
        for leaf in leaves
    ]
    return f"{spec} {kinds}"
