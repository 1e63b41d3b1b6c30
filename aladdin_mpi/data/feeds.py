"""What ``run.batches()`` may be given, and how it is dealt to the workers.

Samples with numbers, whatever their order, are dealt to the sample, and a run that goes on finds
its place among them. What can only be read from its beginning is dealt by whole batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from numbers import Number
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch.utils._pytree import tree_flatten
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    default_collate,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from aladdin_mpi.data.datasets import DatasetPair, MapDataset
from aladdin_mpi.data.images import ImageArrays, SkippedImages, skips_of
from aladdin_mpi.data.loader_order import (
    SamplerOrder,
    arguments_of,
    check_arguments,
    every,
    generator_facts,
    iterates_itself,
    processes_of,
    shuffles,
)
from aladdin_mpi.data.loader_processes import Start
from aladdin_mpi.data.loading import (
    FORKED,
    BatchSource,
    Collate,
    TrainingView,
    global_generators_kept,
    load_in_order,
)
from aladdin_mpi.data.loading import describe as describe_pairs
from aladdin_mpi.data.sampler import Int64Array, Period, ShardedStream, permutation
from aladdin_mpi.data.shards import ShardImages
from aladdin_mpi.errors import UserError

BEGINS_ANEW = "data that can only be read in order begin anew, not where the run had come to"

_SEQUENCES: tuple[Any, ...] = ([], (), Dataset())
FINITE: tuple[type, ...] = (_BaseDataLoaderIter, *(type(iter(each)) for each in _SEQUENCES))
"""Iterators of a DataLoader, a list, a tuple and a data set, which end after one epoch."""


class Source(Protocol):
    """One worker's batches."""

    def next_batch(self, count: int) -> Any:
        """A batch of ``count`` samples; where they come in batches, the next of these."""

    def close(self) -> None:
        """End what loads ahead."""


@dataclass(frozen=True)
class FeedShare:
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

    @property
    def first_workers(self) -> int:
        """How many workers the run began with."""
        return self.past[0].workers if self.past else self.workers


class Feed(ABC):
    """Data for all workers.

    Attributes:
        batch_size: samples of a batch; None: as the run says.
        loader_workers: processes that load ahead; None: as the run says.
        loader_start_method: how they are started; None: as the run says.
        drops_last: an epoch consists of whole rounds, in which every worker has a full batch.
        has_whole_batches: batches are not cut where a segment of the run ends.
        caveat: what a run that goes on does not do as it would have without a break.
        skipped: where the data set notes images that it skips, if it does.
    """

    batch_size: int | None = None
    loader_workers: int | None = None
    loader_start_method: str | None = None
    drops_last = False
    has_whole_batches = False
    caveat: str = ""
    skipped: SkippedImages | None = None

    @abstractmethod
    def length(self, batch_size: int, workers: int = 1) -> int | None:
        """Samples of an epoch; None: nobody knows.

        Args:
            batch_size: of a worker's batch.
            workers: that the run began with.
        """

    def facts(self) -> dict[str, Any]:
        """What the data of all workers must have in common."""
        return {}

    @abstractmethod
    def source(self, share: FeedShare) -> Source:
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
        self._order: SamplerOrder | None = None
        self._loader = loader
        if loader is not None:
            self.batch_size = loader.batch_size
            self.loader_workers, self.loader_start_method = processes_of(loader)
            self.drops_last = self.has_whole_batches = loader.drop_last
            self._collate = loader.collate_fn
            self._order = None if shuffles(loader) else SamplerOrder(loader.sampler, loader)

    def length(self, batch_size: int, workers: int = 1) -> int:
        """Samples of an epoch; with ``drop_last`` those of its whole rounds."""
        length = len(self._dataset) if self._order is None else self._order.length
        return length - length % (batch_size * workers) if self.drops_last else length

    def facts(self) -> dict[str, Any]:
        """Sizes, and what the first sample is made of."""
        if self._pairs:
            return {**describe_pairs(self._dataset), **_facts_of(self._loader)}
        with global_generators_kept():
            sample = _outline(self._dataset[0])
        return {"length": len(self._dataset), "sample": sample, **_facts_of(self._loader)}

    def source(self, share: FeedShare) -> Source:
        """See :meth:`Feed.source`."""
        size = share.batch_size
        length = self.length(size, share.first_workers)
        order = self._ordered(share, length)
        stream = ShardedStream(length, share.worker, share.workers, share.seed, order, share.past)
        stream.position = share.done
        return BatchSource(
            self._dataset,
            stream,
            size,
            share.processes,
            start=share.start,
            collate=self._collate,
            ahead=share.ahead,
            arguments=arguments_of(self._loader, share.seed, share.worker),
        )

    def _ordered(self, share: FeedShare, length: int) -> Callable[[int], Int64Array] | None:
        """The first ``length`` samples of each epoch's order; None: a permutation of all."""
        whole = self._whole_order(share)
        if whole is None:
            count = len(self._dataset)
            if length == count:
                return None
            return lambda epoch: permutation(count, share.seed, epoch)[:length]
        return lambda epoch: whole(epoch)[:length]

    def _whole_order(self, share: FeedShare) -> Callable[[int], Int64Array] | None:
        if self._order is not None:
            return self._order.indices(share.seed)
        if isinstance(self._dataset, ShardImages):
            return _as_it_lies(self._dataset, share)
        return None


class BatchListFeed(Feed):
    """Batches that a batch sampler lists; each counts as ``batch_size`` samples.

    With ``batch_size=None`` each item of the data set is a batch.
    """

    has_whole_batches = True

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self.loader_workers, self.loader_start_method = processes_of(loader)
        self._items_are_batches = loader.batch_sampler is None
        lists = loader.sampler if self._items_are_batches else loader.batch_sampler
        self._order = SamplerOrder(lists, loader, may_be_short=True)
        size = getattr(loader.batch_sampler, "batch_size", None)
        self.batch_size = size if isinstance(size, int) else None

    def length(self, batch_size: int, workers: int = 1) -> int:
        """Samples of an epoch, by count."""
        return self._order.length * batch_size

    def facts(self) -> dict[str, Any]:
        """See :class:`SampleFeed`."""
        return {**SampleFeed(self._loader.dataset).facts(), **_facts_of(self._loader)}

    def source(self, share: FeedShare) -> Source:
        """See :meth:`Feed.source`."""
        count, seed = self._order.length, share.seed
        by_batch = [_by_batch(period, share.batch_size) for period in share.past]
        numbers = ShardedStream(
            count, share.worker, share.workers, seed, lambda epoch: np.arange(count), by_batch
        )
        numbers.position = share.done // share.batch_size
        epochs, collate = self._order.epochs(seed), self._loader.collate_fn
        if self._items_are_batches:
            collate = _OfOne(collate)
        keys = _listed(epochs, numbers, self._items_are_batches)
        view = TrainingView(cast(MapDataset, self._loader.dataset), seed, augment=True)
        arguments = arguments_of(self._loader, share.seed, share.worker)
        return _Batches(load_in_order(view, keys, share.processes, share.start, collate, arguments))


class _OfOne:
    """Converts the one item of a list, which is a batch."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self._convert = convert

    def __call__(self, items: list[Any]) -> Any:
        return self._convert(items[0])


class StreamFeed(Feed):
    """Batches that can only be read in order.

    Args:
        batches: begins anew whenever it is iterated, unless it is an iterator; a batch counts as
            ``batch_size`` samples.
        sharded: each worker's are its own; otherwise worker w of n takes the w-th of every n.
    """

    caveat = BEGINS_ANEW
    has_whole_batches = True

    def __init__(self, batches: Iterable[Any], sharded: bool) -> None:
        self._batches = batches
        self._sharded = sharded
        if isinstance(batches, DataLoader):
            self.batch_size = batches.batch_size

    def length(self, batch_size: int, workers: int = 1) -> int | None:
        """Samples of an epoch, by count, if it says how many batches it has."""
        if isinstance(self._batches, Iterator):
            return None
        try:
            return len(cast(Sized, self._batches)) * batch_size
        except TypeError:
            return None

    def facts(self) -> dict[str, Any]:
        """Return what the generators of all workers that read the same batches have in common."""
        return {} if self._sharded else _facts_of(self._batches)

    def source(self, share: FeedShare) -> Source:
        """See :meth:`Feed.source`."""
        if self._sharded:
            return _Batches(every(self._batches, 0, 1))
        return _Batches(every(self._batches, share.worker, share.workers, share.seed))


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
        data: a data set, a DataLoader, an iterable of batches, or an iterator over them.
        sharded: an iterable gives each worker its own already.
        batch_size: for an iterable data set, whose samples are put together.

    Raises:
        UserError: it is none of them, may be one or the other, or is dealt to ranks already.
    """
    if isinstance(data, DataLoader):
        return _of_loader(data, sharded)
    if isinstance(data, IterableDataset):
        return StreamFeed(DataLoader(data, batch_size=batch_size), sharded)
    if isinstance(data, (DatasetPair, Mapping, str, *FINITE)):
        raise _not_data(data)
    if isinstance(data, Sized) and hasattr(data, "__getitem__"):
        _check_samples(data)
        _check_not_sharded(data, sharded)
        return SampleFeed(data)
    if hasattr(data, "__iter__"):
        return StreamFeed(data, sharded)
    raise _not_data(data)


def _not_data(data: Any) -> UserError:
    hint = ""
    if isinstance(data, DatasetPair):
        hint = "; give its .train"
    elif isinstance(data, FINITE):
        hint = ", which cannot begin anew for the next epoch; give what it was made of"
    return UserError(
        "batches(): expected a data set, a DataLoader, or an iterable of batches, got "
        f"{type(data).__name__}{hint}"
    )


def _check_samples(data: Any) -> None:
    """Refuse a list or another sequence whose items may be samples or batches.

    An item with a number or a string in it is a sample. Of tensors alone, or of lists, either may
    be made.
    """
    if not isinstance(data, Sequence) or not data or _has_scalar(data[0]):
        return
    raise UserError(
        f"batches(): the items of a {type(data).__name__} of {type(data[0]).__name__} can be "
        "samples or batches. For samples pass DataLoader(data, batch_size=...), for batches pass "
        "DataLoader(data, batch_size=None)."
    )


def _has_scalar(item: Any) -> bool:
    """Whether one of its fields has no dimension along which samples could lie."""
    if isinstance(item, Mapping):
        return any(map(_has_scalar, item.values()))
    if isinstance(item, tuple):
        return any(map(_has_scalar, item))
    if isinstance(item, (torch.Tensor, np.ndarray)):
        return item.ndim == 0
    return item is None or isinstance(item, (Number, np.generic, str, bytes))


def _check_not_sharded(data: Any, sharded: bool) -> None:
    if sharded:
        raise UserError(
            "batches(): sharded=True requires an iterable of batches or an IterableDataset. The "
            f"samples of {type(data).__name__} have numbers and are dealt to the workers: leave "
            "sharded out and give every worker the whole data."
        )


def _of_loader(loader: DataLoader[Any], sharded: bool) -> Feed:
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(each, DistributedSampler) for each in samplers):
        raise UserError(
            "batches(): expected a DataLoader for the whole data set, got one with a "
            "DistributedSampler; leave the sampler out: the run deals the samples to the workers"
        )
    check_arguments(loader, sharded)
    if isinstance(loader.dataset, IterableDataset) or iterates_itself(loader):
        return StreamFeed(loader, sharded)
    _check_not_sharded(loader.dataset, sharded)
    if type(loader.batch_sampler) is BatchSampler and loader.batch_size is not None:
        return SampleFeed(loader.dataset, loader)
    return BatchListFeed(loader)


def _facts_of(data: Any) -> dict[str, Any]:
    return generator_facts(data) if isinstance(data, DataLoader) else {}


def _by_batch(period: Period, batch_size: int) -> Period:
    """A period of samples in batches."""
    return Period(tuple(None if n is None else n // batch_size for n in period.taken))


def _as_it_lies(dataset: ShardImages, share: FeedShare) -> Callable[[int], Int64Array]:
    """Each worker reads shards of its own."""
    if share.past:
        raise UserError(
            "--allow-resize: expected data whose order does not depend on the number of workers, "
            "got shards; resume with as many workers as before"
        )
    return lambda epoch: dataset.reading_order(epoch, share.workers, share.seed)


def _listed(
    epochs: Callable[[int], list[Any]], numbers: ShardedStream, items_are_batches: bool
) -> Iterator[list[tuple[int, int]]]:
    """The (epoch, index) pairs of one worker's batches, endlessly."""
    while True:
        (epoch,), (number,) = (each.tolist() for each in numbers.take(1))
        batches = epochs(epoch)
        if number < len(batches):  # some samplers have fewer batches in some epochs
            batch = batches[number]
            yield [(epoch, index) for index in ([batch] if items_are_batches else batch)]


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
