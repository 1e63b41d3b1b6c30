"""The order in which a user's DataLoader gives its samples or batches."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from aladdin_mpi.data.loader_processes import ProcessArguments
from aladdin_mpi.data.loading import NO_ARGUMENTS, global_generators_kept, seed_global_generators
from aladdin_mpi.data.sampler import Int64Array, order_key
from aladdin_mpi.errors import UserError


def check_arguments(loader: DataLoader[Any], sharded: bool) -> None:
    """Refuse arguments that a run cannot follow.

    Raises:
        UserError: names the first of them.
    """
    if loader.timeout and not loader.num_workers:
        raise UserError(
            "batches(): timeout of the DataLoader requires num_workers > 0. Leave it out, or give "
            "num_workers."
        )
    if loader.num_workers and not getattr(loader, "in_order", True) and not sharded:
        raise UserError(
            "batches(): in_order=False of the DataLoader cannot be combined with dealing its "
            "batches to the workers, which need to agree on their order. Leave it out."
        )


def iterates_itself(loader: DataLoader[Any]) -> bool:
    """Return whether its class overrides how batches are made."""
    own = type(loader)
    return own.__iter__ is not DataLoader.__iter__ or (
        own._get_iterator is not DataLoader._get_iterator
    )


def processes_of(loader: DataLoader[Any]) -> tuple[int, str | None]:
    """How many processes load for it, and how they are started, if it says so."""
    context = loader.multiprocessing_context
    return loader.num_workers, None if context is None else context.get_start_method()


def arguments_of(loader: DataLoader[Any] | None, seed: int, worker: int) -> ProcessArguments:
    """Return those for the processes that load for a worker of a run with this seed."""
    if loader is None or not loader.num_workers:
        return NO_ARGUMENTS
    own = seed if loader.generator is None else loader.generator.initial_seed()
    return ProcessArguments(
        loader.timeout,
        loader.prefetch_factor,
        loader.worker_init_fn,
        order_key(own, worker) & 0x7FFFFFFFFFFFFFFF,  # as manual_seed() takes it
    )


def shuffles(loader: DataLoader[Any]) -> bool:
    """Whether its sampler stands for ``shuffle=True``, whose order the run is free to choose."""
    sampler = loader.sampler
    return (
        type(sampler) is RandomSampler
        and sampler.generator is None
        and not sampler.replacement
        and (sampler.num_samples == len(sampler.data_source))
    )


class SamplerOrder:
    """Lists what a sampler gives in each epoch.

    A sampler that draws from the global generators finds them seeded by the run's seed and the
    epoch. Generators that the sampler has been given continue from epoch to epoch, from the
    state that they had then, as they do in a DataLoader.

    Args:
        sampler: of samples or of batches.
        loader: the DataLoader that has it.
        may_be_short: an epoch may have fewer entries than ``len(sampler)``.

    Raises:
        UserError: the sampler has no length.
    """

    def __init__(self, sampler: Any, loader: DataLoader[Any], may_be_short: bool = False) -> None:
        self._sampler = sampler
        self._loader = loader
        self._may_be_short = may_be_short
        self._generators = generators_of(loader)
        self._initial = [generator.get_state() for generator in self._generators]
        try:
            self.length = len(sampler)
        except TypeError as error:
            raise UserError(
                f"batches(): sampler {type(sampler).__name__} of the DataLoader requires a length. "
                "Give it a __len__ that counts what it lists in an epoch."
            ) from error

    def epochs(self, seed: int) -> Callable[[int], list[Any]]:
        """Return a function of an epoch's number that lists its entries."""
        states, coming, last = self._initial, 0, -1
        entries: list[Any] = []

        def entries_of(epoch: int) -> list[Any]:
            nonlocal states, coming, last, entries
            if epoch == last:
                return entries
            if not self._generators:
                coming = epoch  # the seed alone decides
            elif epoch < coming:
                states, coming = self._initial, 0
            while coming <= epoch:
                entries, states = self._draw(seed, coming, states)
                last, coming = coming, coming + 1
            return entries

        return entries_of

    def indices(self, seed: int) -> Callable[[int], Int64Array]:
        """Return the same as arrays, for a sampler of samples."""
        if type(self._sampler) is SequentialSampler:
            in_order = np.arange(self.length)
            return lambda epoch: in_order
        epochs = self.epochs(seed)
        return lambda epoch: np.asarray(epochs(epoch), dtype=np.int64)

    def _draw(
        self, seed: int, epoch: int, states: list[torch.Tensor]
    ) -> tuple[list[Any], list[torch.Tensor]]:
        """List an epoch, with the user's generators in ``states``; also returns their next ones."""
        with global_generators_kept():
            seed_global_generators(order_key(seed, epoch))
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)
            loader = self._loader
            is_shared = any(each is loader.generator for each in self._generators)
            if is_shared and not (epoch and loader.persistent_workers):
                # The seed that a DataLoader draws for its processes whenever it is iterated.
                torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            for owner in _owners(self._sampler):
                if hasattr(owner, "set_epoch"):
                    owner.set_epoch(epoch)
            entries = list(islice(self._sampler, self.length + 1))
        self._check(len(entries), epoch)
        return entries, [generator.get_state() for generator in self._generators]

    def _check(self, count: int, epoch: int) -> None:
        if count > self.length or (count < self.length and not self._may_be_short):
            listed = f"{count}" if count <= self.length else "more"
            raise UserError(
                f"batches(): sampler {type(self._sampler).__name__} of the DataLoader has length "
                f"{self.length} but lists {listed} in epoch {epoch}. Correct its __len__."
            )


def generators_of(loader: DataLoader[Any]) -> list[torch.Generator]:
    """Return the generators by which a DataLoader's samplers draw an order."""
    owners = (*_owners(loader.sampler), *_owners(loader.batch_sampler))
    found = (getattr(owner, "generator", None) for owner in owners)
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def generator_facts(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return what all workers' generators must have in common, or nothing without any."""
    found = generators_of(loader)
    states = [
        f"seed {each.initial_seed()}, state {zlib.crc32(bytes(each.get_state().numpy())):08x}"
        for each in found
    ]
    return {"generator": states} if states else {}


def _owners(sampler: Any) -> tuple[Any, Any]:
    """A sampler and the one that it may wrap."""
    return sampler, getattr(sampler, "sampler", None)


def every(batches: Iterable[Any], first: int, step: int, seed: int | None = None) -> Iterator[Any]:
    """Each ``step``-th batch from number ``first`` on, epoch after epoch.

    With ``seed`` the order that an epoch draws from the global generators when it begins is the
    same for all workers.
    """
    epoch = 0
    while True:
        dataset = getattr(batches, "dataset", batches)
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        number = -1
        for number, batch in enumerate(_begun(batches, epoch, seed)):
            if number % step == first:
                yield batch
        if isinstance(batches, Iterator):
            raise UserError(
                f"batches(): {type(batches).__name__} ended after {number + 1} batches, before the "
                "run did, and an iterator cannot begin again. Give an endless one, a shorter run, "
                "or an iterable that can be iterated again."
            )
        if number < first:
            raise UserError(
                f"batches(): expected at least {step} batches in an epoch, one for each worker, "
                f"got {number + 1}; give more data, smaller batches or fewer workers, or "
                "sharded=True for data that are each worker's own"
            )
        epoch += 1


def _begun(batches: Iterable[Any], epoch: int, seed: int | None) -> Iterator[Any]:
    """An epoch's batches, of which the first is made with the generators seeded."""
    if seed is None:
        return iter(batches)
    with global_generators_kept():
        seed_global_generators(order_key(seed, epoch))
        iterator = iter(batches)
        first = list(islice(iterator, 1))
    return chain(first, iterator)
