"""The run's epochs as the training loader of Lightning's loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from aladdin_mpi.run.data_parallel import DataParallel

_END = object()


class First:
    """The first ``count`` items of a sampler, or of an iterable, in each iteration."""

    def __init__(self, items: Any, count: int) -> None:
        self._items = items
        self._count = count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._items, name)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return islice(self._items, self._count)


def first_batches(loader: Any, count: int) -> Any:
    """Return a loader of the first ``count`` batches of each epoch."""
    is_plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    if not is_plain or isinstance(loader.dataset, IterableDataset):
        return First(loader, count)
    how: dict[str, Any] = {"batch_sampler": First(loader.batch_sampler, count)}
    if loader.batch_size is None:
        how = {"batch_size": None, "sampler": First(loader.sampler, count)}
    elif type(loader.batch_sampler) is BatchSampler:  # of torch, so that batches may be divided
        sampler = First(loader.sampler, min(count * loader.batch_size, len(loader.sampler)))
        how = {
            "batch_size": loader.batch_size,
            "sampler": sampler,
            "drop_last": loader.drop_last,
        }
    for name in (
        "collate_fn",
        "generator",
        "multiprocessing_context",
        "num_workers",
        "persistent_workers",
        "pin_memory",
        "prefetch_factor",
        "timeout",
        "worker_init_fn",
    ):
        how[name] = getattr(loader, name)
    return DataLoader(loader.dataset, **how)


class RunLoader:
    """A training loader, of which Lightning's loops see the run's epochs.

    Its length is that of the given loader: the batches of all workers together.

    Args:
        loader: the script's.
        length: batches of an epoch, or of the run if the data have no length.
        batches: yields the batches of the next epoch.
    """

    def __init__(self, loader: Any, length: int, batches: Callable[[], Iterator[Any]]) -> None:
        self.loader = loader
        self._length = length
        self._batches = batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        # Lightning makes an iterator during set-up: nothing may begin before its first batch.
        yield from self._batches()


class RunEpochs:
    """A run's epochs, which Lightning's loops take batch by batch.

    Lightning has to know during a batch whether it is the epoch's last. This is known once the step
    has been made, so the next batch is fetched then.

    Args:
        run: has not begun; it begins now, and a server returns after its end.
        data: for :meth:`DataParallel.epochs`.
        end_after: called with the number of batches, once it is known.
    """

    def __init__(
        self,
        run: DataParallel,
        data: Any,
        end_after: Callable[[int], None],
    ) -> None:
        self._end_after = end_after
        self._epochs = run.epochs(data)
        self._epoch = next(self._epochs, None)
        self._is_in_epoch = False
        self._next: Any = _END
        self._taken = 0

    @property
    def number(self) -> int | None:
        """The number of the current epoch, or of the next one; None after the last."""
        return None if self._epoch is None else int(self._epoch)

    def batches(self) -> Iterator[Any]:
        """Yield the batches of the next epoch.

        Lightning runs validation and epoch schedulers after the last batch. If none was known to be
        the last, or this worker has none, one that is None follows.
        """
        if self._epoch is None:
            return
        self._is_in_epoch, self._taken = True, 0
        is_last_known = self.fetch()
        while self._is_in_epoch:
            batch, self._next = self._next, _END
            self._taken += 1
            yield batch
            is_last_known = not self._is_in_epoch
            if self._is_in_epoch and self._next is _END:
                self.fetch()
        if not is_last_known:
            self._end_after(self._taken + 1)
            yield None

    def fetch(self) -> bool:
        """Fetch the next batch of the epoch after a step; without one, end the epoch.

        Returns:
            Whether there is one.
        """
        assert self._epoch is not None
        self._next = next(self._epoch, _END)
        if self._next is _END:
            self.leave()
            self._end_after(self._taken)
        return self._is_in_epoch

    def leave(self) -> None:
        """End the current epoch, for all workers; the last one's end completes the run."""
        if self._is_in_epoch:
            self._is_in_epoch = False
            self._epoch = next(self._epochs, None)
