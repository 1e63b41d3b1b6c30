"""Images in shards, which workers read from beginning to end, each its own."""

from __future__ import annotations

import io
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from aladdin_mpi.data.augment import LargeImages, SmallImages
from aladdin_mpi.data.images import CorruptImageError, ImageFiles, Int64Array, decode
from aladdin_mpi.data.randomness import SHUFFLING, sample_keys
from aladdin_mpi.data.shard_index import Entries, packed, unpacked
from aladdin_mpi.data.skipped import SkippedImages
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.general import SHUFFLE_BUFFER

MOST_OPEN = 64
"""Shards that a process keeps open: as many as a shuffle buffer reaches over."""


class ShardImages(ImageFiles):
    """The images of several shards, numbered through.

    Args:
        shards: the tar files.
        entries: what lies where in each.
        recipe: what to do with a decoded image.
        skipped: see :class:`ImageFiles`.
        shuffle_buffer: places by which a sample may be moved out of its shard's order.
    """

    def __init__(
        self,
        shards: Sequence[Path],
        entries: Sequence[Entries],
        recipe: SmallImages | LargeImages,
        skipped: SkippedImages | None = None,
        shuffle_buffer: int = SHUFFLE_BUFFER,
    ) -> None:
        labels = np.concatenate([each["label"] for each in entries])
        super().__init__(shards[0].parent, (), labels.tolist(), recipe, None, skipped)
        self._shards = list(shards)
        self._entries = list(entries)
        self._starts = np.cumsum([0, *map(len, entries)])
        self._window = shuffle_buffer
        self._files = _Files()

    def __getstate__(self) -> dict[str, Any]:
        # A hundred megabytes of an ImageNet, for each loader process, unless they are mapped.
        return {**self.__dict__, "_entries": list(map(packed, self._entries))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._entries = list(map(unpacked, state["_entries"]))

    def reading_order(self, epoch: int, workers: int, seed: int) -> Int64Array:
        """An order of all samples: worker w of n gets the places w, w + n, ... of it."""
        return _order(tuple(map(len, self._entries)), epoch, workers, seed, self._window)

    def check_classes(self, count: int) -> None:
        """See that no class is unknown to the training set, which has ``count``.

        Raises:
            UserError: names the first sample of one that is.
        """
        unknown = np.flatnonzero(self.targets.numpy() >= count)
        if len(unknown):
            first = int(unknown[0])
            raise UserError(
                f"{self._path(first)}: expected a class of the training shards, 0 to {count - 1}, "
                f"got {int(self.targets[first])}; look at --data-dir"
            )

    # -- reading ------------------------------------------------------------------------
    def _decode(self, index: int) -> Image.Image:
        shard, entry = self._place(index)
        try:
            data = self._files.read(self._shards[shard], int(entry["offset"]), int(entry["size"]))
        except OSError as error:
            raise CorruptImageError(self._path(index), str(error)) from error
        return decode(self._path(index), self.size, io.BytesIO(data))

    def _path(self, index: int) -> Path:
        shard, entry = self._place(index)
        return self._shards[shard] / os.fsdecode(entry["name"])

    def _place(self, index: int) -> tuple[int, Any]:
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        return shard, self._entries[shard][index - self._starts[shard]]


class _Files:
    """Files that are kept open, by each process for itself; any of its threads may read."""

    def __init__(self) -> None:
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self.open: OrderedDict[Path, int] = OrderedDict()
        self._process = os.getpid()

    def read(self, path: Path, offset: int, size: int) -> bytes:
        """A part of a file.

        Raises:
            UserError: the file cannot be opened.
            OSError: the part cannot be read.
        """
        if self._process != os.getpid():
            self._begin()  # it was forked
        with self._lock:
            return os.pread(self._handle(path), size, offset)

    def _handle(self, path: Path) -> int:
        if path not in self.open:
            while len(self.open) >= MOST_OPEN:
                os.close(self.open.popitem(last=False)[1])
            self.open[path] = _opened(path)
        self.open.move_to_end(path)
        return self.open[path]


def _opened(path: Path) -> int:
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"{path}: cannot be opened ({error}); look at --data-dir") from error
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return handle


@lru_cache(maxsize=4)
def _order(sizes: tuple[int, ...], epoch: int, workers: int, seed: int, window: int) -> Int64Array:
    """Shards in an order by the seed, dealt to the workers as they lie; then moved a little.

    Each worker's part is read from beginning to end, but for the first and last of its shards, in
    which a neighbour's part may end or begin. In it a sample is moved by less than ``window``
    places, as a shuffle buffer of that size does.
    """
    starts = np.cumsum([0, *sizes])
    shards = np.argsort(sample_keys(seed, SHUFFLING, epoch, np.arange(len(sizes)) - len(sizes)))
    row = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in shards])
    order = np.empty(len(row), dtype=np.int64)
    start = 0
    for worker in range(workers):
        length = len(range(worker, len(row), workers))
        order[worker::workers] = _moved(row[start : start + length], epoch, seed, window)
        start += length
    order.flags.writeable = False
    return order


def _moved(part: Int64Array, epoch: int, seed: int, window: int) -> Int64Array:
    """The same samples, each later by a number below ``window`` that is drawn for it."""
    draws = sample_keys(seed, SHUFFLING, epoch, part) >> np.uint64(11)
    places = np.arange(len(part)) + draws.astype(np.float64) * (window / 2.0**53)
    moved: Int64Array = part[np.argsort(places, kind="stable")]
    return moved
