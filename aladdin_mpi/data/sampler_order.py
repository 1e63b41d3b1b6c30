"""The order in which a user's sampler lists samples or batches, the same for every worker."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, SequentialSampler

from aladdin_mpi.data.loading import global_generators_kept, seed_global_generators
from aladdin_mpi.data.randomness import order_key
from aladdin_mpi.data.sampler import Int64Array
from aladdin_mpi.errors import UserError


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
