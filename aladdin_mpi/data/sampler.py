"""Which samples a worker sees, in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from aladdin_mpi.errors import UserError

UInt64Array = npt.NDArray[np.uint64]

SHUFFLING = 1
"""Purpose: the order of the samples in an epoch."""
AUGMENTATION = 2
"""Purpose: the augmentation of a sample in an epoch."""
SYNTHESIS = 3
"""Purpose: the contents of a synthetic data set."""

_MASK = 2**64 - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(values: UInt64Array) -> UInt64Array:
    """Map 64-bit values one to one onto 64-bit values that look random."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def sample_keys(
    seed: int, purpose: int, epochs: npt.NDArray[Any] | int, indices: npt.NDArray[Any]
) -> UInt64Array:
    """Return one 64-bit random number for each (epoch, index).

    Args:
        seed: any integer.
        purpose: one of the constants of this module.
        epochs: one epoch for all, or one for each of ``indices``.
        indices: sample numbers, shape (n,).

    Within one epoch different indices have different numbers.
    """
    state = np.array([seed & _MASK], dtype=np.uint64)
    state = _mix(state * _GOLDEN + np.uint64(purpose))
    state = _mix(state + np.atleast_1d(np.asarray(epochs)).astype(np.uint64) * _GOLDEN)
    return _mix(state + indices.astype(np.uint64) * _GOLDEN)


def order_key(seed: int, epoch: int) -> int:
    """Return the number by which the order of an epoch is drawn."""
    return int(sample_keys(seed, SHUFFLING, epoch, np.zeros(1, dtype=np.int64))[0])


def bounded(keys: UInt64Array, field: int, bound: int) -> npt.NDArray[np.int64]:
    """Return integers in [0, ``bound``) from the ``field``-th 16 bits (0 to 3) of each key."""
    bits = (keys >> np.uint64(16 * field)) & np.uint64(0xFFFF)
    return ((bits * np.uint64(bound)) >> np.uint64(16)).astype(np.int64)


Int64Array = npt.NDArray[np.int64]


@lru_cache(maxsize=4)
def permutation(length: int, seed: int, epoch: int) -> Int64Array:
    """Return the order of one epoch; all ranks of a process share the array."""
    # The keys of one epoch are all different, so the order has no ties.
    order = np.argsort(sample_keys(seed, SHUFFLING, epoch, np.arange(length)))
    order.flags.writeable = False
    return order


@dataclass(frozen=True)
class Period:
    """Part of a run with one number of workers.

    Attributes:
        taken: of each worker, how many samples it has had in the period; None: it has failed,
            and nobody knows.
    """

    taken: tuple[int | None, ...]

    @property
    def workers(self) -> int:
        """Their number."""
        return len(self.taken)


@dataclass(frozen=True)
class Rest:
    """What earlier periods have left of the epochs that they have begun.

    Attributes:
        first_epoch: of which nobody has had anything yet.
        epochs: of the samples that are left, in rising order.
        places: of these samples in the orders of their epochs.
    """

    first_epoch: int
    epochs: Int64Array
    places: Int64Array

    @classmethod
    def behind(cls, length: int, past: Sequence[Period]) -> Rest:
        """What ``past`` has left of epochs of ``length`` samples."""
        nothing = np.empty(0, dtype=np.int64)
        rest = cls(0, nothing, nothing)
        for period in past:
            rest = rest._after(length, period)
        return rest

    def _after(self, length: int, period: Period) -> Rest:
        """What is left after one more period, in which ``self`` was dealt first."""
        n = period.workers
        epoch_and_offset = [self._reached(length, worker, period) for worker in range(n)]
        known = [place for place in epoch_and_offset if place is not None]
        end = max((epoch + (offset > 0) for epoch, offset in known), default=self.first_epoch)
        left = np.zeros(len(self.epochs), dtype=bool)
        for worker, taken in enumerate(period.taken):
            if taken is not None:
                left[worker::n][taken:] = True
        epochs, places = [self.epochs[left]], [self.places[left]]
        for epoch in range(self.first_epoch, end):
            is_left = np.zeros(length, dtype=bool)
            for worker, reached in enumerate(epoch_and_offset):
                if reached is not None and reached[0] <= epoch:
                    is_left[worker::n][reached[1] if reached[0] == epoch else 0 :] = True
            (found,) = np.nonzero(is_left)
            places.append(found.astype(np.int64))
            epochs.append(np.full(len(found), epoch, dtype=np.int64))
        return Rest(end, np.concatenate(epochs), np.concatenate(places))

    def _reached(self, length: int, worker: int, period: Period) -> tuple[int, int] | None:
        """The epoch that a worker of the period is in, and how many of its samples it has had."""
        taken, n = period.taken[worker], period.workers
        if taken is None:
            return None
        behind_rest = max(0, taken - len(self.epochs[worker::n]))
        epoch, offset = divmod(behind_rest, len(range(worker, length, n)))
        return self.first_epoch + epoch, offset


class ShardedStream:
    """The endless sequence of samples of one worker.

    Each epoch is a permutation of all samples, a function of (``seed``, epoch), of which
    worker w of n takes the places w, w + n, w + 2n, ... The shards of one epoch never
    overlap, together are everything, and differ in size by at most one. Workers pass
    through their epochs each at its own speed.

    Where the run had other numbers of workers before, what these have left of their epochs
    comes first, dealt in the same way. So no sample of an epoch is left out or comes twice.

    Args:
        length: number of samples in the data set.
        worker: this worker's number, 0 to ``workers`` - 1.
        workers: number of workers.
        seed: the seed of the run.
        order: of an epoch's samples, ``length`` indices; None: a permutation by the seed.
        past: periods of the run with other numbers of workers.

    Raises:
        UserError: if there are fewer samples than workers.
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
                f"the training set has {length} samples for {workers} workers: every worker needs "
                f"at least one; start at most {length} workers or use a larger data set"
            )
        self.length = length
        self.worker = worker
        self.workers = workers
        self.seed = seed
        self._order = order
        self._past = past
        rest = Rest.behind(length, past)
        self._first_epoch = rest.first_epoch
        self._rest_epochs = rest.epochs[worker::workers]
        self._rest_places = rest.places[worker::workers]
        self.shard_size = len(range(worker, length, workers))
        self._position = 0
        self._shard_epoch = -1
        self._shard = np.empty(0, dtype=np.int64)

    @property
    def position(self) -> int:
        """How many samples have been taken since the start. May be set, in constant time."""
        return self._position

    @position.setter
    def position(self, value: int) -> None:
        if value < 0:
            raise ValueError(f"position must not be negative, got {value}")
        self._position = value

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, counted from 0."""
        if self._position < len(self._rest_epochs):
            return int(self._rest_epochs[self._position])
        behind_rest = self._position - len(self._rest_epochs)
        return self._first_epoch + behind_rest // self.shard_size

    def copy(self) -> ShardedStream:
        """Return an independent stream at the same position."""
        whose = self.worker, self.workers
        other = ShardedStream(self.length, *whose, self.seed, self._order, self._past)
        other.position = self.position
        return other

    def take(self, count: int) -> tuple[Int64Array, Int64Array]:
        """Return the epochs and the indices of the next ``count`` samples, each (count,)."""
        epochs = np.empty(count, dtype=np.int64)
        indices = np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            epoch, part = self.epoch, self._part(count - done)
            epochs[done : done + len(part)] = epoch
            indices[done : done + len(part)] = part
            done += len(part)
            self._position += len(part)
        return epochs, indices

    def _part(self, most: int) -> Int64Array:
        """The next samples, ``most`` or less, all of the present epoch."""
        behind_rest = self._position - len(self._rest_epochs)
        if behind_rest < 0:
            stop = np.searchsorted(self._rest_epochs, self.epoch, side="right")
            places = self._rest_places[self._position : min(int(stop), self._position + most)]
            return self._order_of(self.epoch)[places]
        offset = behind_rest % self.shard_size
        return self._shard_of(self.epoch)[offset : offset + most]

    def _shard_of(self, epoch: int) -> Int64Array:
        if epoch != self._shard_epoch:
            order = self._order_of(epoch)
            # A view: workers in the same epoch of one process share one permutation.
            self._shard = order[self.worker :: self.workers]
            self._shard_epoch = epoch
        return self._shard

    def _order_of(self, epoch: int) -> Int64Array:
        if self._order is None:
            return permutation(self.length, self.seed, epoch)
        return self._order(epoch)

    def state_dict(self) -> dict[str, int]:
        """Return what :meth:`load_state_dict` needs."""
        return {**self._identity(), "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where ``state`` was taken.

        Raises:
            UserError: if it belongs to another data set, seed or number of workers.
        """
        for name, mine in self._identity().items():
            if state[name] != mine:
                raise UserError(
                    f"the checkpoint's sample stream has {name} {state[name]}, this run has "
                    f"{mine}: resume with the same data set, seed and number of workers"
                )
        self.position = state["position"]

    def _identity(self) -> dict[str, int]:
        return {
            "length": self.length,
            "worker": self.worker,
            "workers": self.workers,
            "seed": self.seed,
        }
