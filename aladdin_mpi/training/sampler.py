"""Which samples a worker sees, in which order."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from aladdin_mpi.errors import UserError
from aladdin_mpi.training.randomness import SHUFFLING, sample_keys

Int64Array = npt.NDArray[np.int64]


@lru_cache(maxsize=4)
def _permutation(length: int, seed: int, epoch: int) -> Int64Array:
    """Return the order of one epoch; all ranks of a process share the array."""
    # The keys of one epoch are all different, so the order has no ties.
    order = np.argsort(sample_keys(seed, SHUFFLING, epoch, np.arange(length)))
    order.flags.writeable = False
    return order


class ShardedStream:
    """The endless sequence of samples of one worker.

    Each epoch is a permutation of all samples, a function of (``seed``, epoch), of which
    worker w of n takes the places w, w + n, w + 2n, ... The shards of one epoch never
    overlap, together are everything, and differ in size by at most one. Workers pass
    through their epochs each at its own speed.

    Args:
        length: number of samples in the data set.
        worker: this worker's number, 0 to ``workers`` - 1.
        workers: number of workers.
        seed: the seed of the run.
        order: of an epoch's samples, ``length`` indices; None: a permutation by the seed.

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
        return self._position // self.shard_size

    def copy(self) -> ShardedStream:
        """Return an independent stream at the same position."""
        other = ShardedStream(self.length, self.worker, self.workers, self.seed, self._order)
        other.position = self.position
        return other

    def take(self, count: int) -> tuple[Int64Array, Int64Array]:
        """Return the epochs and the indices of the next ``count`` samples, each (count,)."""
        epochs = np.empty(count, dtype=np.int64)
        indices = np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            epoch, offset = divmod(self._position, self.shard_size)
            part = self._shard_of(epoch)[offset : offset + count - done]
            epochs[done : done + len(part)] = epoch
            indices[done : done + len(part)] = part
            done += len(part)
            self._position += len(part)
        return epochs, indices

    def _shard_of(self, epoch: int) -> Int64Array:
        if epoch != self._shard_epoch:
            order = self._order_of(epoch)
            # A view: workers in the same epoch of one process share one permutation.
            self._shard = order[self.worker :: self.workers]
            self._shard_epoch = epoch
        return self._shard

    def _order_of(self, epoch: int) -> Int64Array:
        if self._order is None:
            return _permutation(self.length, self.seed, epoch)
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
