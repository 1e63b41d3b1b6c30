"""The data that ``run.batches()`` accepts, and their distribution to the workers.

Samples with indices are distributed one by one in any order, and a resumed run continues at its
position. Data that can only be read from the beginning are distributed by whole batches.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
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
    RandomSampler,
    SequentialSampler,
    default_collate,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from aladdin_mpi.data.datasets import DatasetPair, MapDataset
from aladdin_mpi.data.images import ImageArrays, SkippedImages, skips_of
from aladdin_mpi.data.loader_processes import Start
from aladdin_mpi.data.loading import (
    FORKED,
    BatchSource,
    Collate,
    TrainingLoader,
    describe,
    global_generators_kept,
    load_in_order,
    parts_of,
    seed_global_generators,
    takers_of_epoch,
)
from aladdin_mpi.data.sampler import Int64Array, Period, ShardedStream, order_key, permutation
from aladdin_mpi.data.shards import ShardImages
from aladdin_mpi.errors import UserError

_SEQUENCES: tuple[Any, ...] = ([], (), Dataset())
FINITE: tuple[type, ...] = (_BaseDataLoaderIter, *(type(iter(each)) for each in _SEQUENCES))
"""Iterators of a DataLoader, a list, a tuple and a dataset, which end after one epoch."""


class Source(Protocol):
    """One worker's batches."""

    def next_batch(self, count: int) -> Any:
        """Return a batch of ``count`` samples, or the next batch if the data consist of batches."""

    def close(self) -> None:
        """Stop loading ahead."""


@dataclass(frozen=True)
class FeedShare:
    """A worker's share of a feed, of which it has used ``done`` samples in this period.

    Either ``processes`` load ahead, or, with ``ahead``, a thread. ``past`` are periods of the run
    with other numbers of workers.
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
        drops_last: an epoch consists of whole rounds, in which every worker has a full batch.
        has_whole_batches: batches are not cut at the end of a segment of the run.
        caveat: the difference of a resumed run from an uninterrupted one.
        skipped: the dataset's record of skipped images, if it skips any.
    """

    # Options of the run that a DataLoader determines; None if it does not.
    batch_size: int | None = None
    loader_workers: int | None = None
    loader_start_method: str | None = None
    drops_last = False
    has_whole_batches = False
    caveat: str = ""
    skipped: SkippedImages | None = None

    @abstractmethod
    def length(self, batch_size: int, workers: int = 1) -> int | None:
        """Return the samples of an epoch for ``workers`` at the run's start; None if unknown."""

    def facts(self) -> dict[str, Any]:
        """Return the facts that all workers' data must share."""
        return {}

    @abstractmethod
    def source(self, share: FeedShare) -> Source:
        """Return the batches of one worker."""

    @abstractmethod
    def share_of_pass(self, share: FeedShare) -> Iterator[Any]:
        """Return one worker's batches of a single pass: every n-th, as one process has them.

        The order, and random numbers that samples draw, do not depend on the number of workers.
        """


class SampleFeed(Feed):
    """Samples by index, in an order by the run's seed, by a sampler, or by their shards.

    With ``pairs`` they are (input, label), for the built-in training.
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
            self.loader_workers, self.loader_start_method = _processes_of(loader)
            self.drops_last = self.has_whole_batches = loader.drop_last
            self._collate = loader.collate_fn
            self._order = None if _shuffles(loader) else SamplerOrder(loader.sampler, loader)

    def length(self, batch_size: int, workers: int = 1) -> int:
        """Return the samples of an epoch; with ``drop_last``, those of its whole rounds."""
        length = len(self._dataset) if self._order is None else self._order.length
        return length - length % (batch_size * workers) if self.drops_last else length

    def facts(self) -> dict[str, Any]:
        """Return sizes, and the structure of the first sample."""
        if self._pairs:
            return {**describe(self._dataset), **_generator_facts(self._loader)}
        with global_generators_kept():
            sample = _outline(self._dataset[0])
        facts = {"length": len(self._dataset), "sample": sample}
        return {**facts, **_generator_facts(self._loader)}

    def source(self, share: FeedShare) -> Source:
        """Return the batches of one worker."""
        first_workers = share.past[0].workers if share.past else share.workers
        length = self.length(share.batch_size, first_workers)
        whole = self._whole_order(share)
        stream = ShardedStream(
            length,
            share.worker,
            share.workers,
            share.seed,
            lambda epoch: whole(epoch)[:length],
            share.past,
        )
        stream.position = share.done
        return BatchSource(
            self._dataset,
            stream,
            share.batch_size,
            share.processes,
            share.start,
            self._collate,
            share.ahead,
            _process_arguments(self._loader, share),
        )

    def share_of_pass(self, share: FeedShare) -> Iterator[Any]:
        """Return one worker's batches of a single pass."""
        loader = self._loader or DataLoader(self._dataset, share.batch_size)
        return BatchListFeed(loader).share_of_pass(share)

    def _whole_order(self, share: FeedShare) -> Callable[[int], Int64Array]:
        """Return a function that lists the samples of an epoch, given its number."""
        if self._order is not None:
            return self._order.indices(share.seed)
        if not isinstance(self._dataset, ShardImages):
            return partial(permutation, len(self._dataset), share.seed)
        if share.past:
            raise UserError(
                "--allow-resize cannot be combined with shards, whose order depends on the "
                "number of workers. Resume with the number of workers of the checkpoint."
            )
        shards: ShardImages = self._dataset
        return lambda epoch: shards.reading_order(epoch, share.workers, share.seed)


class BatchListFeed(Feed):
    """Batches that a batch sampler lists; each counts as ``batch_size`` samples.

    With ``batch_size=None``, each item of the dataset is a batch.
    """

    has_whole_batches = True

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self.loader_workers, self.loader_start_method = _processes_of(loader)
        self._items_are_batches = loader.batch_sampler is None
        lists = loader.sampler if self._items_are_batches else loader.batch_sampler
        self._order = SamplerOrder(lists, loader, may_be_short=True)
        size = getattr(loader.batch_sampler, "batch_size", None)
        self.batch_size = size if isinstance(size, int) else None

    def length(self, batch_size: int, workers: int = 1) -> int:
        """Return the samples of an epoch, by count."""
        return self._order.length * batch_size

    def facts(self) -> dict[str, Any]:
        """Return the facts that all workers' data must share."""
        return {**SampleFeed(self._loader.dataset).facts(), **_generator_facts(self._loader)}

    def source(self, share: FeedShare) -> Source:
        """Return the batches of one worker."""
        count, size = self._order.length, share.batch_size
        past = [
            Period(tuple(None if taken is None else taken // size for taken in period.taken))
            for period in share.past
        ]
        numbers = ShardedStream(
            count, share.worker, share.workers, share.seed, lambda epoch: np.arange(count), past
        )
        numbers.position = share.done // size
        return _Batches(self._load(share, self._keys(numbers, share.seed)))

    def share_of_pass(self, share: FeedShare) -> Iterator[Any]:
        """Return one worker's batches of a single pass."""
        batches = self._order.epochs(share.seed)(0)[share.worker :: share.workers]
        return self._load(share, map(partial(self._keys_of, 0), batches), is_training=False)

    def _load(
        self, share: FeedShare, keys: Iterator[list[tuple[int, int]]], is_training: bool = True
    ) -> Iterator[Any]:
        """Yield the batches with the given (epoch, index) pairs."""
        collate = self._loader.collate_fn
        if self._items_are_batches:
            collate = partial(_convert_item, collate)
        dataset = cast(MapDataset, self._loader.dataset)
        load = TrainingLoader(dataset, share.seed, collate, is_training)
        arguments = _process_arguments(self._loader, share)
        return load_in_order(
            load, keys, share.processes, share.start, restart=share.done, **arguments
        )

    def _keys_of(self, epoch: int, batch: Any) -> list[tuple[int, int]]:
        return [(epoch, i) for i in ([batch] if self._items_are_batches else batch)]

    def _keys(self, numbers: ShardedStream, seed: int) -> Iterator[list[tuple[int, int]]]:
        """Yield the (epoch, index) pairs of one worker's batches, endlessly."""
        epochs = self._order.epochs(seed)
        while True:
            (epoch,), (number,) = (each.tolist() for each in numbers.take(1))
            batches = epochs(epoch)
            if number < len(batches):  # some samplers have fewer batches in certain epochs
                yield self._keys_of(epoch, batches[number])


def _convert_item(convert: Callable[[Any], Any], items: list[Any]) -> Any:
    """Convert the one item of a list, which is a batch."""
    return convert(items[0])


class StreamFeed(Feed):
    """Batches that can only be read in order.

    Args:
        batches: restarts whenever it is iterated, unless it is an iterator; a batch counts as
            ``batch_size`` samples.
        sharded: each worker has different batches; otherwise worker w of n takes the w-th of
            every n batches.
    """

    caveat = (
        "the data can only be read in order, and so start from their beginning, not from where "
        "the run stopped"
    )
    has_whole_batches = True

    def __init__(self, batches: Iterable[Any], sharded: bool) -> None:
        # A new source, as after a failure, continues an iterator where the last one stopped.
        self._batches = _Counted(batches) if isinstance(batches, Iterator) else batches
        self._sharded = sharded
        if isinstance(batches, DataLoader):
            self.batch_size = batches.batch_size

    def length(self, batch_size: int, workers: int = 1) -> int | None:
        """Return the samples of an epoch, by count, if the number of batches is known.

        If they are sharded, an epoch is one pass of every worker over its own batches.
        """
        if isinstance(self._batches, Iterator):
            return None
        try:
            batches = len(cast(Sized, self._batches))
        except TypeError:
            return None
        return batches * batch_size * (workers if self._sharded else 1)

    def facts(self) -> dict[str, Any]:
        """Return the facts about generators that all workers with the same batches must share."""
        return {} if self._sharded else _generator_facts(self._batches)

    def source(self, share: FeedShare) -> Source:
        """Return the batches of one worker."""
        if self._sharded:
            return _Batches(_every(self._batches, 0, 1))
        return _Batches(_every(self._batches, share.worker, share.workers, share.seed))

    def share_of_pass(self, share: FeedShare) -> Iterator[Any]:
        """Return one worker's batches of a single pass; all of them if it is sharded."""
        if self._sharded:
            return iter(self._batches)
        return islice(_epoch_of(self._batches, 0, share.seed), share.worker, None, share.workers)


class _Batches:
    """A source of existing batches, whatever their size."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def next_batch(self, count: int) -> Any:
        return next(self._batches)

    def close(self) -> None:
        self._batches = iter(())  # ends the loader processes


class _Counted(Iterator[Any]):
    """An iterator that counts the items taken from it."""

    def __init__(self, items: Iterator[Any]) -> None:
        self.items = items
        self.count = 0

    def __next__(self) -> Any:
        item = next(self.items)
        self.count += 1
        return item


def _every(batches: Iterable[Any], first: int, step: int, seed: int | None = None) -> Iterator[Any]:
    """Yield each ``step``-th batch from number ``first`` on, epoch after epoch.

    Numbers continue in the next epoch, so that all batches are used equally often if ``step`` does
    not divide them.

    With ``seed``, an order that is drawn from the global generators at the start of an epoch is
    the same for all workers.
    """
    epoch, takers = 0, takers_of_epoch(*_shapers(batches))
    number = batches.count if isinstance(batches, _Counted) else 0
    while True:
        for each in takers:
            each.set_epoch(epoch)
        before = number
        for batch in _epoch_of(batches, epoch, seed):
            if number % step == first:
                yield batch
            number += 1
        if isinstance(batches, _Counted):
            raise UserError(
                f"batches(): {type(batches.items).__name__} ended after {number} batches, before "
                "the run did, and an iterator cannot be restarted. Pass an endless one, a "
                "shorter run, or an iterable that can be iterated again."
            )
        if number == before:
            raise UserError(
                "batches(): expected at least one batch in an epoch, got none; pass data that "
                "can be iterated again"
            )
        epoch += 1


def _shapers(batches: Iterable[Any]) -> tuple[Any, ...]:
    """Return the objects that may determine the batches of an epoch."""
    batches = batches.items if isinstance(batches, _Counted) else batches
    if not isinstance(batches, DataLoader):
        return batches, getattr(batches, "dataset", None)
    samplers = (*_owners(batches.sampler), *_owners(batches.batch_sampler))
    return batches, *parts_of(batches.dataset), *samplers


def _epoch_of(batches: Iterable[Any], epoch: int, seed: int | None) -> Iterator[Any]:
    """Return an iterator over an epoch's batches, whose first is made with seeded generators."""
    if seed is None:
        return iter(batches)
    with global_generators_kept():
        seed_global_generators(order_key(seed, epoch))
        iterator = iter(batches)
        first = list(islice(iterator, 1))
    return chain(first, iterator)


def feed_of(data: Any, sharded: bool, batch_size: int) -> Feed:
    """Return the feed that distributes ``data``.

    Args:
        data: a dataset, a DataLoader, an iterable of batches, or an iterator over them.
        sharded: whether an iterable yields different batches on each worker.
        batch_size: for an iterable dataset, whose samples are collated.

    Raises:
        UserError: unsupported or ambiguous data, or data that are distributed already.
    """
    if isinstance(data, DataLoader):
        return _feed_of_loader(data, sharded)
    if isinstance(data, IterableDataset):
        return StreamFeed(DataLoader(data, batch_size=batch_size), sharded)
    is_unusable = isinstance(data, (DatasetPair, Mapping, str, *FINITE))
    if not is_unusable and isinstance(data, Sized) and hasattr(data, "__getitem__"):
        _check_samples(data)
        _check_not_sharded(data, sharded)
        return SampleFeed(data)
    if not is_unusable and hasattr(data, "__iter__"):
        return StreamFeed(data, sharded)
    hint = "; pass its .train" if isinstance(data, DatasetPair) else ""
    if isinstance(data, FINITE):
        hint = (
            ", which cannot start again for the next epoch; pass the iterable that it was made from"
        )
    raise UserError(
        "batches(): expected a data set, a DataLoader, or an iterable of batches, got "
        f"{type(data).__name__}{hint}"
    )


def _check_samples(data: Any) -> None:
    """Refuse a sequence whose items may be samples or batches.

    An item with a number or a string is a sample. Tensors alone, or lists, may be either.
    """
    if not isinstance(data, Sequence) or not data or _has_scalar(data[0]):
        return
    raise UserError(
        f"batches(): the items of a {type(data).__name__} of {type(data[0]).__name__} can be "
        "samples or batches. For samples pass DataLoader(data, batch_size=...), for batches pass "
        "DataLoader(data, batch_size=None)."
    )


def _has_scalar(item: Any) -> bool:
    """Return whether a field of an item has no batch dimension."""
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
            f"samples of {type(data).__name__} have numbers and are distributed among the "
            "workers: leave sharded out and pass every worker the whole data."
        )


def _outline(sample: Any) -> str:
    """Return a sample's structure, without sizes, which may differ among workers."""
    leaves, spec = tree_flatten(sample)
    kinds = [
        f"{leaf.dtype}".removeprefix("torch.") + f" {leaf.dim()}-D"
        if isinstance(leaf, torch.Tensor)
        else type(leaf).__name__
        for leaf in leaves
    ]
    return f"{spec} {kinds}"


# -- a user's DataLoader ------------------------------------------------------------------------
def _feed_of_loader(loader: DataLoader[Any], sharded: bool) -> Feed:
    _check_loader(loader, sharded)
    own = type(loader)
    iterates_itself = (
        own.__iter__ is not DataLoader.__iter__ or own._get_iterator is not DataLoader._get_iterator
    )
    if isinstance(loader.dataset, IterableDataset) or iterates_itself:
        _check_epochs_reach(loader)
        return StreamFeed(loader, sharded)
    _check_not_sharded(loader.dataset, sharded)
    if type(loader.batch_sampler) is BatchSampler and loader.batch_size is not None:
        return SampleFeed(loader.dataset, loader)
    return BatchListFeed(loader)


def _check_loader(loader: DataLoader[Any], sharded: bool) -> None:
    """Refuse arguments that a run does not support."""
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(each, DistributedSampler) for each in samplers):
        raise UserError(
            "batches(): expected a DataLoader for the whole data set, got one with a "
            "DistributedSampler; leave the sampler out, because the run distributes the samples "
            "among the workers"
        )
    if loader.timeout and not loader.num_workers:
        raise UserError(
            "batches(): timeout of the DataLoader requires num_workers > 0. Leave it out, or "
            "pass num_workers."
        )
    if loader.num_workers and not getattr(loader, "in_order", True) and not sharded:
        raise UserError(
            "batches(): in_order=False of the DataLoader cannot be combined with dealing its "
            "batches to the workers, which need to agree on their order. Leave it out."
        )


def _check_epochs_reach(loader: DataLoader[Any]) -> None:
    """Refuse a data set whose epochs cannot be set in the loader's processes."""
    if loader.persistent_workers and takers_of_epoch(*parts_of(loader.dataset)):
        raise UserError(
            "batches(): persistent_workers=True of the DataLoader keeps copies of the data set in "
            f"its processes, which set_epoch() of {type(loader.dataset).__name__} does not reach. "
            "Leave persistent_workers out."
        )


def _processes_of(loader: DataLoader[Any]) -> tuple[int, str | None]:
    """Return the loader's number of processes, and their start method, if set."""
    context = loader.multiprocessing_context
    return loader.num_workers, None if context is None else context.get_start_method()


def _process_arguments(loader: DataLoader[Any] | None, share: FeedShare) -> dict[str, Any]:
    """Return the loader's arguments for :func:`load_in_order`."""
    generator = None if loader is None else loader.generator
    own = share.seed if generator is None else generator.initial_seed()
    arguments: dict[str, Any] = {"seed": order_key(own, share.worker)}
    if loader is not None and loader.num_workers:
        arguments["timeout"] = loader.timeout
        arguments["prefetch_factor"] = loader.prefetch_factor
        arguments["worker_init_fn"] = loader.worker_init_fn
    return arguments


def _shuffles(loader: DataLoader[Any]) -> bool:
    """Return whether the sampler is that of ``shuffle=True``, so that the run may set the order."""
    sampler = loader.sampler
    return (
        type(sampler) is RandomSampler
        and sampler.generator is None
        and not sampler.replacement
        and (sampler.num_samples == len(sampler.data_source))
    )


class SamplerOrder:
    """The entries of a sampler in each epoch.

    Global generators are seeded by the run's seed and the epoch. The sampler's generators continue
    from epoch to epoch, starting from their initial state, as in a DataLoader.

    Args:
        sampler: of samples or of batches.
        loader: the DataLoader of the sampler.
        may_be_short: whether an epoch may have fewer entries than ``len(sampler)``.

    Raises:
        UserError: the sampler has no length.
    """

    def __init__(self, sampler: Any, loader: DataLoader[Any], may_be_short: bool = False) -> None:
        self._sampler = sampler
        self._loader = loader
        self._may_be_short = may_be_short
        self._generators = _generators_of(loader)
        self._initial = [generator.get_state() for generator in self._generators]
        try:
            self.length = len(sampler)
        except TypeError as error:
            raise UserError(
                f"batches(): sampler {type(sampler).__name__} of the DataLoader requires a length. "
                "Give it a __len__ that counts what it lists in an epoch."
            ) from error

    def epochs(self, seed: int) -> Callable[[int], list[Any]]:
        """Return a function that lists the entries of an epoch, given its number."""
        states, coming, last = self._initial, 0, -1
        entries: list[Any] = []

        def entries_of(epoch: int) -> list[Any]:
            nonlocal states, coming, last, entries
            if epoch == last:
                return entries
            if not self._generators:
                coming = epoch  # only the seed determines the order
            elif epoch < coming:
                states, coming = self._initial, 0
            while coming <= epoch:
                entries, states = self._draw(seed, coming, states)
                last, coming = coming, coming + 1
            return entries

        return entries_of

    def indices(self, seed: int) -> Callable[[int], Int64Array]:
        """Return a function that lists an epoch's samples as an array, given its number."""
        if type(self._sampler) is SequentialSampler:
            in_order = np.arange(self.length)
            return lambda epoch: in_order
        epochs = self.epochs(seed)
        return lambda epoch: np.asarray(epochs(epoch), dtype=np.int64)

    def _draw(
        self, seed: int, epoch: int, states: list[torch.Tensor]
    ) -> tuple[list[Any], list[torch.Tensor]]:
        """Return an epoch's entries, with generators in ``states``, and their next states."""
        with global_generators_kept(), _generators_kept(self._generators):
            seed_global_generators(order_key(seed, epoch))
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)
            loader = self._loader
            is_shared = any(each is loader.generator for each in self._generators)
            if is_shared and not (epoch and loader.persistent_workers):
                # A DataLoader draws a seed for its processes whenever it is iterated.
                torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            for owner in takers_of_epoch(*_owners(self._sampler)):
                owner.set_epoch(epoch)
            entries = list(islice(self._sampler, self.length + 1))
            after = [generator.get_state() for generator in self._generators]
        count = len(entries)
        if count > self.length or (count < self.length and not self._may_be_short):
            listed = f"{count}" if count <= self.length else "more"
            raise UserError(
                f"batches(): sampler {type(self._sampler).__name__} of the DataLoader has length "
                f"{self.length} but lists {listed} in epoch {epoch}. Correct its __len__."
            )
        return entries, after


@contextmanager
def _generators_kept(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Restore the states of the generators after the block.

    Workers that draw different numbers of epochs must agree on the order of another pass.
    """
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _generators_of(loader: DataLoader[Any]) -> list[torch.Generator]:
    """Return the generators of a DataLoader's samplers."""
    owners = (*_owners(loader.sampler), *_owners(loader.batch_sampler))
    attributes = (getattr(owner, "generator", None) for owner in owners)
    generators = (each for each in attributes if isinstance(each, torch.Generator))
    return list({id(each): each for each in generators}.values())


def _generator_facts(data: Any) -> dict[str, Any]:
    """Return the facts that all workers' generators must share; empty without generators."""
    states = [
        f"seed {each.initial_seed()}, state {zlib.crc32(bytes(each.get_state().numpy())):08x}"
        for each in (_generators_of(data) if isinstance(data, DataLoader) else ())
    ]
    return {"generator": states} if states else {}


def _owners(sampler: Any) -> tuple[Any, Any]:
    """Return a sampler and the one that it wraps, or None."""
    return sampler, getattr(sampler, "sampler", None)
