"""Images in shards, which workers read from beginning to end, each its own."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import tarfile
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from aladdin_mpi.data.augment import LargeImages, SmallImages
from aladdin_mpi.data.host_cache import cached_array, index_dir
from aladdin_mpi.data.images import CorruptImageError, ImageFiles, Int64Array, SkippedImages, decode
from aladdin_mpi.data.sampler import SHUFFLING, sample_keys
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.general import SHUFFLE_BUFFER

IMAGES = ("jpg", "jpeg", "png", "webp", "ppm", "bmp")
LABELS = ("cls", "json")
LAYOUT = (
    "expected DIR/train/*.tar and DIR/test/*.tar (or val), or DIR/train-*.tar and DIR/val-*.tar, "
    "also with a name before it (imagenet-train-*.tar)"
)
NAME_BYTES = 64
ENTRY = np.dtype([("offset", "<i8"), ("size", "<i8"), ("label", "<i8"), ("name", f"S{NAME_BYTES}")])
"""Of a sample: where its image lies in the shard, how long it is, and how both are called."""
Entries = npt.NDArray[Any]


def find_shards(data_dir: Path | None) -> tuple[list[Path], list[Path]]:
    """Return the shards to train and to test with, sorted by name.

    Raises:
        UserError: ``--data-dir`` is missing, or has none for one of the two.
    """
    if data_dir is None:
        raise UserError(f"--data-dir: data set shards needs it; {LAYOUT}")
    found = []
    for names in (("train",), ("test", "val", "validation")):
        shards = next(filter(None, (_shards(data_dir, name) for name in names)), [])
        if not shards:
            raise UserError(f"--data-dir {data_dir}: no shards to {names[0]} with; {LAYOUT}")
        found.append(shards)
    train, test = found
    return train, test


def _shards(data_dir: Path, name: str) -> list[Path]:
    patterns = (f"{name}/*.tar", f"{name}*.tar", f"*[-_]{name}[-_]*.tar")
    return next(filter(None, (sorted(data_dir.glob(pattern)) for pattern in patterns)), [])


def indexed(shards: Sequence[Path]) -> list[Entries]:
    """The entries of each shard.

    Raises:
        UserError: one cannot be read, or has a sample without an image or label.
    """
    # Each shard is read by one rank of the host. One order for all of them, or such that begin
    # at neighbours, would have all wait for the one that is ahead.
    order = random.Random().sample(range(len(shards)), len(shards))
    folder = index_dir(shards[0].resolve().parent)
    found = {place: _cached(shards[place], folder) for place in order}
    return [found[place] for place in range(len(shards))]


def packed(entries: Entries) -> Entries | Path:
    """To send to another process of the host: the file that they are mapped from, if they are."""
    name = getattr(entries, "filename", None)
    return entries if name is None else Path(name)


def unpacked(sent: Entries | Path) -> Entries:
    """What :func:`packed` has made, as entries again."""
    return _mapped(np.load(sent, mmap_mode="c")) if isinstance(sent, Path) else sent


def _cached(shard: Path, folder: Path) -> Entries:
    try:
        state = shard.stat()
    except OSError as error:
        raise UserError(f"{shard}: cannot be read ({error}); replace or remove it") from error
    seen = f"shard index, version 2\0{shard.resolve()}\0{state.st_size}\0{state.st_mtime_ns}"
    digest = hashlib.sha256(os.fsencode(seen)).hexdigest()[:32]
    return _mapped(cached_array(f"shard-{digest}", lambda: _read(shard).view(np.uint8), folder))


def _mapped(raw: npt.NDArray[np.uint8]) -> Entries:
    return raw.view(ENTRY)


def _read(shard: Path) -> Entries:
    entries = list(_samples(shard))
    if not entries:
        raise UserError(f"{shard}: expected samples of an image and a label, got none")
    return np.array(entries, dtype=ENTRY)


def _samples(shard: Path) -> Iterator[tuple[int, int, int, bytes]]:
    """Each sample, when the files of the next one begin."""
    sample = _Sample(shard, "")
    try:
        with tarfile.open(shard, "r:") as archive:
            for member in archive:
                key, suffix = _split(member.name)
                if not member.isfile() or not key:
                    continue
                if key != sample.key:
                    yield from sample.entry()
                    sample = _Sample(shard, key)
                if suffix in IMAGES:
                    sample.image = member
                elif suffix in LABELS:
                    sample.labels[suffix] = _content(archive, member)
            yield from sample.entry()
    except (tarfile.TarError, OSError) as error:
        raise UserError(
            f"{shard}: cannot be read as a tar file ({error}); shards are not compressed; replace "
            "or remove it"
        ) from error


class _Sample:
    """What has been found of a sample.

    Attributes:
        labels: contents of the files that may have its label, by their suffixes.
    """

    def __init__(self, shard: Path, key: str) -> None:
        self.key = key
        self.image: tarfile.TarInfo | None = None
        self.labels: dict[str, bytes] = {}
        self._shard = shard

    def entry(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Its entry; none if there are only other files.

        Raises:
            UserError: it lacks an image or a label.
        """
        if self.image is None and not self.labels:
            return
        if self.image is None or not self.labels:
            lacks, known = ("an image", IMAGES) if self.image is None else ("a label", LABELS)
            raise UserError(
                f"{self._shard}: expected {lacks} of sample {self.key}, got none; known are "
                f"{' '.join(known)}"
            )
        name = os.fsencode(self.image.name)[-NAME_BYTES:]
        yield self.image.offset_data, self.image.size, self._label(), name

    def _label(self) -> int:
        suffix = next(each for each in LABELS if each in self.labels)
        content = self.labels[suffix]
        try:
            label = int(content) if suffix == "cls" else _label_in(json.loads(content))
        except (ValueError, KeyError, TypeError):
            label = -1
        if label < 0:
            raise UserError(
                f"{self._shard}: expected the number of a class, 0 or above, in "
                f"{self.key}.{suffix}, got {content[:40]!r}; write the shard with numbers"
            )
        return label


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    return b"" if file is None else file.read()


def _split(name: str) -> tuple[str, str]:
    """A sample's key and a file's suffix; no key where a name begins with a dot or has none."""
    folder, slash, last = name.rpartition("/")
    stem, dot, suffix = last.partition(".")
    return f"{folder}{slash}{stem}" if stem and dot else "", suffix.lower()


def _label_in(found: dict[str, Any]) -> int:
    label = found["label"] if "label" in found else found["cls"]
    if not isinstance(label, int):
        raise TypeError
    return label


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
