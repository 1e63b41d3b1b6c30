"""The data of a run: their distribution to workers, and the batches of a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map

from aladdin_mpi.accelerator import CopyStream, is_accelerator
from aladdin_mpi.data.feeds import Feed, FeedShare, SampleFeed, Source, feed_of
from aladdin_mpi.data.loader_processes import Start
from aladdin_mpi.data.sampler import Period
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.run import RunOptions
from aladdin_mpi.session.plan import Origin, samples_of
from aladdin_mpi.transport.base import surviving_ranks
from aladdin_mpi.worker.worker import Worker


@dataclass(frozen=True)
class TrainingData:
    """Data, and the options including those that a DataLoader determines.

    Attributes:
        length: samples of an epoch; of the run, if the data have no length.
        feed: None if only the number of samples is used.
        uncut: samples of a batch, if none may be cut; 0: the last ones of a segment may be.
        is_sized: whether the data have a length.
    """

    options: RunOptions
    length: int
    feed: Feed | None
    uncut: int = 0
    is_sized: bool = True

    def facts(self, is_server: bool) -> dict[str, Any]:
        """Return the facts in which all ranks' data must agree; a server reads no data."""
        is_read = not is_server and self.options.compute == "real" and self.length
        facts = self.feed.facts() if is_read and self.feed is not None else {}
        return {**facts, "length": self.length}

    def source(self, worker: Worker, past: Sequence[Period]) -> Source | None:
        """Return a worker's batches, from its present position; None with timed computing.

        Args:
            worker: this rank's; in an island, each process has different batches.
            past: periods of the run with other numbers of workers.
        """
        options = self.options
        if options.compute == "timed" or self.feed is None:
            return None
        index = worker.whole.rank - worker.servers
        share = FeedShare(
            index,
            worker.whole.size - worker.servers,
            options.seed,
            options.batch_size,
            worker.samples - worker.left_out,
            options.loader_workers,
            Start(options.loader_start_method, warns=index == 0),
            ahead=not worker.transport.models_time,
            past=past,
        )
        return self.feed.source(share)


def prepare(
    data: Any,
    sharded: bool,
    options: RunOptions,
    given: Mapping[str, Any],
    is_custom_loop: bool,
    origin: Origin,
) -> TrainingData:
    """Prepare ``data`` for the run.

    Args:
        data: see :meth:`aladdin_mpi.DataParallel.batches`.
        sharded: see :meth:`aladdin_mpi.DataParallel.batches`.
        options: of the run.
        given: options that the user has passed by name.
        is_custom_loop: whether a custom training loop uses the data; the built-in training has
            samples (input, label).
        origin: of the run.

    Raises:
        UserError: the data cannot be distributed, or options differ from those of a DataLoader.
    """
    if options.compute == "timed" and isinstance(data, int):
        return TrainingData(options, data, None, is_sized=False)
    if not is_custom_loop:
        return TrainingData(options, len(data), SampleFeed(data, pairs=True))
    feed = feed_of(data, sharded, options.batch_size)
    options = options.model_copy(update=_decided(feed, given))
    length = feed.length(options.batch_size, origin.first_workers)
    is_sized = length is not None
    if length is None:
        length = samples_of(options, None, origin.first_workers)
    if length is None:
        raise UserError(
            f"--epochs requires data with a length; {type(data).__name__} has none. Pass "
            "samples= or steps= instead."
        )
    if feed.drops_last:
        _check_rounds(options, length, origin.first_workers)
    if not length:
        raise UserError(
            f"training loop: expected data with at least one sample, got {type(data).__name__} "
            "of none; check what it is made of"
        )
    uncut = options.batch_size if feed.has_whole_batches else 0
    return TrainingData(options, length, feed, uncut, is_sized)


def _check_rounds(options: RunOptions, length: int, workers: int) -> None:
    """Check that a run with ``drop_last`` consists of full batches alone."""
    size = options.batch_size * workers
    round_of = f"a round of {workers} workers with batch_size {options.batch_size}"
    if not length:
        raise UserError(
            f"batches(): drop_last=True of the DataLoader requires {size} samples, {round_of}, "
            "and the data have fewer. Leave drop_last out, or use fewer workers or smaller "
            "batches."
        )
    total = samples_of(options, length, workers)
    if total is not None and total % size:
        name = "samples" if options.samples is not None else "epochs"
        raise UserError(
            f"--{name}: drop_last=True of the DataLoader requires a run of whole rounds, multiples "
            f"of {size} samples ({round_of}), but {name}={getattr(options, name):g} is {total} "
            "samples. Use --steps, or leave drop_last out."
        )


def _decided(feed: Feed, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a DataLoader determines."""
    options = {}
    for name in ("batch_size", "loader_workers", "loader_start_method"):
        value = getattr(feed, name)
        if value is None:
            continue
        if name in given and given[name] != value:
            raise UserError(
                f"{name}: expected the DataLoader's value, {value}, got {given[name]}; leave it out"
            )
        options[name] = value
    return options


def evaluation_share(
    data: Any, sharded: bool, worker: Worker, options: RunOptions
) -> Iterator[Any]:
    """Return this worker's share of one pass over ``data``; failed workers get none.

    Raises:
        UserError: the data cannot be distributed.
    """
    feed = feed_of(data, sharded, options.batch_size)
    ranks = [rank for rank in surviving_ranks(worker.whole) if rank >= worker.servers]
    share = FeedShare(
        ranks.index(worker.whole.rank),
        len(ranks),
        options.seed,
        options.batch_size,
        processes=feed.loader_workers or 0,
        start=Start(feed.loader_start_method or options.loader_start_method),
    )
    return feed.share_of_pass(share)


class Delivery:
    """Transfer of batches of any structure to a device, by pinned memory on a separate stream."""

    def __init__(self, device: torch.device, channels_last: bool) -> None:
        self._device = device
        self._channels_last = channels_last
        self._copies = CopyStream(device) if is_accelerator(device) else None

    def __call__(self, batch: Any) -> Any:
        """Return the batch on the device."""
        # torch keeps a part of a packed sequence on the CPU.
        return tree_map(self._put, batch, is_leaf=lambda part: isinstance(part, PackedSequence))

    def _put(self, item: Any) -> Any:
        if not isinstance(item, Tensor):
            # Some containers are unknown to torch but have to(), such as a tokenizer's batches.
            return item.to(self._device) if callable(getattr(item, "to", None)) else item
        if self._channels_last and item.dim() == 4:
            item = item.contiguous(memory_format=torch.channels_last)
        if self._copies is None or item.device.type != "cpu" or item.is_sparse:
            return item.to(self._device, non_blocking=True)
        return self._copies.fetch(item if item.is_pinned() else item.pin_memory())[0]


_END = object()
NO_BATCH = object()
"""Takes the place of a batch if a worker has none but may have reached the end of an epoch."""


class Batches(Iterator[Any]):
    """The batches of a run, for one loop.

    If it is garbage-collected before its end, the loop was left by ``break`` or by an error; the
    two cannot be distinguished at that moment.

    Args:
        batches: of the run.
        on_collect: called when this object is garbage-collected.
        check: called before each batch.
        on_batch: called with each batch, or with `NO_BATCH`.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        on_collect: Callable[[], None],
        check: Callable[[], None],
        on_batch: Callable[[Any], None],
    ) -> None:
        self._batches = batches
        self._on_collect = on_collect
        self._check = check
        self._on_batch = on_batch
        self.fetched: list[Any] = []

    def __next__(self) -> Any:
        self._check()
        batch = self.fetched.pop() if self.fetched else next(self._batches)
        self._on_batch(batch)
        return batch

    def fetch(self) -> None:
        """Fetch the first batch, if any, without returning it."""
        self._check()
        self.fetched = [each for each in islice(self._batches, 1) if each is not NO_BATCH]

    def __del__(self) -> None:
        self._on_collect()


class Epoch(int, Iterator[Any]):
    """A worker's batches while the workers together pass once through the data.

    It is also the epoch's number, so that scripts can compare, print and add to it. A slow worker
    has fewer batches, or none. ``break`` ends the epoch for all workers.

    Args:
        number: from 0.
        batches: of the run.
        is_past: returns whether there is no further batch in this epoch.
        on_end: called when a loop over the epoch has ended or was left.
        skip: skips the epoch's remaining samples, on all workers.

    Attributes:
        is_left: a loop over the epoch was left.
    """

    def __new__(cls, number: int, *_: Any) -> Epoch:
        """Create it with the value ``number``."""
        return super().__new__(cls, number)

    def __init__(
        self,
        number: int,
        batches: Iterator[Any],
        is_past: Callable[[], bool],
        on_end: Callable[[], None],
        skip: Callable[[], None],
    ) -> None:
        self.is_left = False
        self._is_done = False
        self._batches = batches
        self._is_past = is_past
        self._on_end = on_end
        self._skip = skip

    def __reduce__(self) -> NoReturn:
        raise UserError(
            "training loop: an epoch of run.epochs() cannot be saved. Save its number, int(epoch)."
        )

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches. Python closes this generator when a loop over it is left."""
        self.is_left = False
        try:
            while (batch := next(self, _END)) is not _END:
                yield batch
        finally:
            self.is_left = not self._is_done
            self._on_end()

    def complete(self) -> None:
        """End the epoch for all workers, if it has not ended.

        This worker takes part in the steps of samples that it was granted before, without a
        gradient, so that no other worker waits for it.
        """
        if not self._is_done:
            self._skip()
            while next(self, _END) is not _END:
                pass

    def __next__(self) -> Any:
        while not self._is_past():
            batch = next(self._batches, _END)
            if batch is _END:
                break
            if batch is not NO_BATCH:
                return batch
        self._is_done, self.is_left = True, False
        raise StopIteration
