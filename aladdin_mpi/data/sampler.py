"""The order of samples, and their distribution to workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from aladdin_mpi.errors import UserError

UInt64Array = npt.NDArray[np.uint64]
Int64Array = npt.NDArray[np.int64]

# Purposes of random numbers: order of an epoch, augmentation of a sample, synthetic images.
SHUFFLING, AUGMENTATION, SYNTHESIS = 1, 2, 3

_MASK = 2**64 - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(values: UInt64Array) -> UInt64Array:
    """Map 64-bit values one to one to pseudorandom 64-bit values."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def sample_keys(
    seed: int, purpose: int, epochs: npt.NDArray[Any] | int, indices: npt.NDArray[Any]
) -> UInt64Array:
    """Return one 64-bit random number for each (epoch, index), different within an epoch.

    Args:
        seed: any integer.
        purpose: one of the constants of this module.
        epochs: one epoch for all, or one for each of ``indices``.
        indices: sample numbers, shape (n,).
    """
    state = np.array([seed & _MASK], dtype=np.uint64)
    state = _mix(state * _GOLDEN + np.uint64(purpose))
    state = _mix(state + np.atleast_1d(np.asarray(epochs)).astype(np.uint64) * _GOLDEN)
    return _mix(state + indices.astype(np.uint64) * _GOLDEN)


def order_key(seed: int, epoch: int) -> int:
    """Return the random number that determines the order of an epoch."""
    return int(sample_keys(seed, SHUFFLING, epoch, np.zeros(1, dtype=np.int64))[0])


def bounded(keys: UInt64Array, field: int, bound: int) -> npt.NDArray[np.int64]:
    """Return integers in [0, ``bound``) from the ``field``-th 16 bits (0 to 3) of each key."""
    bits = (keys >> np.uint64(16 * field)) & np.uint64(0xFFFF)
    return ((bits * np.uint64(bound)) >> np.uint64(16)).astype(np.int64)


@lru_cache(maxsize=4)
def permutation(length: int, seed: int, epoch: int) -> Int64Array:
    """Return the order of one epoch; all ranks of a process share the array."""
    # The keys of one epoch are all different, so the order has no ties.
    order = np.argsort(sample_keys(seed, SHUFFLING, epoch, np.arange(length)))
    order.flags.writeable = False
    return order


@dataclass(frozen=True)
class Period:
    """A part of a run with a constant number of workers.

    ``taken`` is each worker's number of samples in the period, None (unknown) if it failed.
    """

    taken: tuple[int | None, ...]

    @property
    def workers(self) -> int:
        """The number of workers."""
        return len(self.taken)


@dataclass(frozen=True)
class Rest:
    """The remaining samples of epochs that were begun in earlier periods.

    Attributes:
        first_epoch: the first epoch that no worker has begun.
        epochs: of the remaining samples, in ascending order.
        places: positions of these samples in the orders of their epochs.
    """

    first_epoch: int
    epochs: Int64Array
    places: Int64Array

    @classmethod
    def after(cls, length: int, past: Sequence[Period]) -> Rest:
        """Return the samples that remain after ``past``, with epochs of ``length`` samples."""
        nothing = np.empty(0, dtype=np.int64)
        rest = cls(0, nothing, nothing)
        for period in past:
            rest = rest._after(length, period)
        return rest

    def _after(self, length: int, period: Period) -> Rest:
        """Return the rest after another period, in which the samples of ``self`` came first."""
        n = period.workers
        remains = np.zeros(len(self.epochs), dtype=bool)
        # Each worker's epoch at the end of the period, and the samples that it has used of it.
        reached: dict[int, tuple[int, int]] = {}
        for worker, taken in enumerate(period.taken):
            if taken is not None:
                remains[worker::n][taken:] = True
                of_epochs = max(0, taken - len(self.epochs[worker::n]))
                epoch, offset = divmod(of_epochs, len(range(worker, length, n)))
                reached[worker] = self.first_epoch + epoch, offset
        ends = (epoch + (offset > 0) for epoch, offset in reached.values())
        end = max(ends, default=self.first_epoch)
        epochs, places = [self.epochs[remains]], [self.places[remains]]
        for epoch in range(self.first_epoch, end):
            is_left = np.zeros(length, dtype=bool)
            for worker, (last, offset) in reached.items():
                if last <= epoch:
                    is_left[worker::n][offset if last == epoch else 0 :] = True
            (positions,) = np.nonzero(is_left)
            places.append(positions.astype(np.int64))
            epochs.append(np.full(len(positions), epoch, dtype=np.int64))
        return Rest(end, np.concatenate(epochs), np.concatenate(places))


class ShardedStream:
    """The endless sequence of a worker's samples.

    Each epoch is a permutation of all samples, a function of (``seed``, epoch), of which worker w
    of n takes the positions w, w + n, w + 2n, ... The shards of an epoch are disjoint and complete,
    and differ in size by at most one. Each worker advances at its own speed.

    Samples that remain of epochs from periods with other numbers of workers come first,
    distributed in the same way. So no sample of an epoch is left out or repeated.

    Args:
        length: number of samples in the dataset.
        worker: this worker's number, 0 to ``workers`` - 1.
        workers: number of workers.
        seed: the seed of the run.
        order: returns an epoch's ``length`` indices; None for a permutation by the seed.
        past: periods of the run with other numbers of workers.

    Attributes:
        position: number of samples taken since the start; may be set, in constant time.

    Raises:
        UserError: fewer samples than workers.
    """

    def __init__(
        self,
        length: int,
        worker: int,
        workers: int,
        seed: int,
        order: Callable[[int], Int64Array] | None = None,
        past: Sequence[Period] = (),
    ) -> None:
        if not 0 <= worker < workers:
            raise ValueError(f"worker must be in [0, {workers}), not {worker}")
        if length < workers:
            raise UserError(
                f"training data: expected at least one sample for each worker, got {length} "
                f"samples for {workers} workers; start at most {length} workers or use more data"
            )
        self.seed = seed
        self.workers = workers
        self._part = slice(worker, None, workers)
        self._order = order or (lambda epoch: permutation(length, seed, epoch))
        rest = Rest.after(length, past)
        self._first_epoch = rest.first_epoch
        self._rest_epochs = rest.epochs[self._part]
        self._rest_places = rest.places[self._part]
        self.shard_size = len(range(worker, length, workers))
        self.position = 0
        self._shard_epoch = -1
        self._shard = np.empty(0, dtype=np.int64)

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, counted from 0."""
        if self.position < len(self._rest_epochs):
            return int(self._rest_epochs[self.position])
        return self._first_epoch + (self.position - len(self._rest_epochs)) // self.shard_size

    def take(self, count: int) -> tuple[Int64Array, Int64Array]:
        """Return the epochs and the indices of the next ``count`` samples, each (count,)."""
        epochs = np.empty(count, dtype=np.int64)
        indices = np.empty(count, dtype=np.int64)
        filled = 0
        while filled < count:
            epoch, part = self.epoch, self._next(count - filled)
            epochs[filled : filled + len(part)] = epoch
            indices[filled : filled + len(part)] = part
            filled += len(part)
            self.position += len(part)
        return epochs, indices

    def _next(self, most: int) -> Int64Array:
        """Return up to ``most`` samples, all of the present epoch."""
        epoch, offset = self.epoch, self.position - len(self._rest_epochs)
        if offset < 0:
            stop = int(np.searchsorted(self._rest_epochs, epoch, side="right"))
            places = self._rest_places[self.position : min(stop, self.position + most)]
            return self._order(epoch)[places]
        if epoch != self._shard_epoch:
            # A view: workers of one process in the same epoch share the permutation.
            self._shard, self._shard_epoch = self._order(epoch)[self._part], epoch
        offset %= self.shard_size
        return self._shard[offset : offset + most]
