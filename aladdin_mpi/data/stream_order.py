"""The order of batches that can only be read from their beginning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

from aladdin_mpi.data.loading import global_generators_kept, seed_global_generators
from aladdin_mpi.data.randomness import order_key
from aladdin_mpi.errors import UserError


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
