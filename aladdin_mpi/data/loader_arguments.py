"""How a run follows the arguments of a user's DataLoader."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, RandomSampler

from aladdin_mpi.data.loader_processes import ProcessArguments
from aladdin_mpi.data.loading import NO_ARGUMENTS
from aladdin_mpi.data.randomness import order_key
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
