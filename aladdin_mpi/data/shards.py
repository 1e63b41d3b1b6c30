"""Images in tar shards; each worker reads its own shards sequentially."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import tarfile
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from aladdin_mpi.data.augment import Recipe
from aladdin_mpi.data.host_cache import cached_array, index_dir
from aladdin_mpi.data.images import CorruptImageError, ImageFiles, SkippedImages, decode
from aladdin_mpi.data.sampler import SHUFFLING, Int64Array, sample_keys
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
"""A sample: offset and size of its image in the shard, its label, and the image's name."""
Entries = npt.NDArray[Any]


def find_shards(data_dir: Path | None) -> tuple[list[Path], list[Path]]:
    """Return the training and the test shards, sorted by name.

    Raises:
        UserError: ``--data-dir`` is missing, or has no shards of one of the two.
    """
    if data_dir is None:
        raise UserError(f"--dataset shards requires --data-dir; {LAYOUT}")
    splits = []
    for names in (("train",), ("test", "val", "validation")):
        shards = next(filter(None, (_shards(data_dir, name) for name in names)), [])
        if not shards:
            raise UserError(f"--data-dir {data_dir}: no shards to {names[0]} with; {LAYOUT}")
        splits.append(shards)
    return splits[0], splits[1]


def _shards(data_dir: Path, name: str) -> list[Path]:
    patterns = (f"{name}/*.tar", f"{name}*.tar", f"*[-_]{name}[-_]*.tar")
    return next(filter(None, (sorted(data_dir.glob(pattern)) for pattern in patterns)), [])


def indexed(shards: Sequence[Path]) -> list[Entries]:
    """Return the entries of each shard.

    Raises:
        UserError: a shard cannot be read, or has a sample without an image or label.
    """
    # One rank of the host reads each shard. With the same order, or with orders that begin at
    # neighbours, all would wait for the rank that is ahead.
    order = random.Random().sample(range(len(shards)), len(shards))
    folder = index_dir(shards[0].resolve().parent)
    entries = {place: _cached(shards[place], folder) for place in order}
    return [entries[place] for place in range(len(shards))]


def _cached(shard: Path, folder: Path) -> Entries:
    try:
        state = shard.stat()
    except OSError as error:
        raise UserError(f"{shard}: cannot be read ({error}). Replace or remove it.") from error
    state_text = f"shard index, version 2\0{shard.resolve()}\0{state.st_size}\0{state.st_mtime_ns}"
    digest = hashlib.sha256(os.fsencode(state_text)).hexdigest()[:32]
    return cached_array(f"shard-{digest}", lambda: _read(shard), folder).view(ENTRY)


def _read(shard: Path) -> npt.NDArray[np.uint8]:
    try:
        with tarfile.open(shard, "r:") as archive:
            entries = list(_entries(shard, archive))
    except (tarfile.TarError, OSError) as error:
        raise UserError(
            f"{shard}: cannot be read as a tar file ({error}). Shards are not compressed. "
            "Replace or remove it."
        ) from error
    if not entries:
        raise UserError(
            f"{shard}: expected samples of an image and a label, got none; replace or remove it"
        )
    return np.array(entries, dtype=ENTRY).view(np.uint8)


def _entries(shard: Path, archive: tarfile.TarFile) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield each sample's entry; the files of a sample are adjacent.

    Raises:
        UserError: a sample lacks an image or a label.
    """
    files = (member for member in archive if member.isfile() and _split(member.name)[0])
    for key, members in groupby(files, lambda member: _split(member.name)[0]):
        image, labels = None, {}
        for member in members:
            suffix = _split(member.name)[1]
            if suffix in IMAGES:
                image = member
            elif suffix in LABELS and (file := archive.extractfile(member)):
                labels[suffix] = file.read()
        if image is None and not labels:
            continue
        if image is None or not labels:
            lacks, known = ("an image", IMAGES) if image is None else ("a label", LABELS)
            raise UserError(
                f"{shard}: expected {lacks} of sample {key!r}, got none; supported are "
                f"{' '.join(known)}"
            )
        label = _label(shard, key, labels)
        yield image.offset_data, image.size, label, os.fsencode(image.name)[-NAME_BYTES:]


def _split(name: str) -> tuple[str, str]:
    """Return a sample's key and a file's suffix; no key if a name has no stem or no suffix."""
    folder, slash, last = name.rpartition("/")
    stem, dot, suffix = last.partition(".")
    return f"{folder}{slash}{stem}" if stem and dot else "", suffix.lower()


def _label(shard: Path, key: str, labels: dict[str, bytes]) -> int:
    suffix = next(each for each in LABELS if each in labels)
    content = labels[suffix]
    try:
        label: Any = json.loads(content) if suffix == "json" else int(content)
        if suffix == "json":
            label = label["label"] if "label" in label else label["cls"]
    except (ValueError, KeyError, TypeError):
        label = None
    if not isinstance(label, int) or label < 0:
        raise UserError(
            f"{shard}: expected the number of a class, 0 or above, in {key}.{suffix}, got "
            f"{content[:40]!r}; write the shard with numbers"
        )
    return label


MOST_OPEN = 64
"""Shards that a process keeps open, as many as a shuffle buffer spans."""


class ShardImages(ImageFiles):
    """The images of several shards, tar files with their ``entries``, with consecutive indices.

    A sample is moved by less than ``shuffle_buffer`` places from its position in the shard.
    """

    def __init__(
        self,
        shards: Sequence[Path],
        entries: Sequence[Entries],
        recipe: Recipe,
        skipped: SkippedImages | None = None,
        shuffle_buffer: int = SHUFFLE_BUFFER,
    ) -> None:
        labels = np.concatenate([each["label"] for each in entries])
        super().__init__(shards[0].parent, (), labels.tolist(), recipe, None, skipped)
        self._shards = list(shards)
        self._entries = list(entries)
        self._starts = np.cumsum([0, *map(len, entries)])
        self._window = shuffle_buffer
        self._file = lru_cache(MOST_OPEN)(_ShardFile)

    def __getstate__(self) -> dict[str, Any]:
        # Send the names of mapped files, as the entries of ImageNet are a hundred megabytes for
        # each loader process.
        sent = [getattr(each, "filename", None) or each for each in self._entries]
        return {**self.__dict__, "_entries": sent, "_file": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _file=lru_cache(MOST_OPEN)(_ShardFile))
        self._entries = [
            each if isinstance(each, np.ndarray) else np.load(each, mmap_mode="c").view(ENTRY)
            for each in state["_entries"]
        ]

    def reading_order(self, epoch: int, workers: int, seed: int) -> Int64Array:
        """Return an order of all samples; worker w of n takes the positions w, w + n, ..."""
        return _order(tuple(map(len, self._entries)), epoch, workers, seed, self._window)

    def check_classes(self, count: int) -> None:
        """Check that all classes are among the ``count`` classes of the training set.

        Raises:
            UserError: names the first sample of another class.
        """
        unknown = np.flatnonzero(self.targets.numpy() >= count)
        if len(unknown):
            first = int(unknown[0])
            raise UserError(
                f"{self._path(first)}: expected a class of the training shards, 0 to "
                f"{count - 1}, got {int(self.targets[first])}; check --data-dir"
            )

    def _decode(self, index: int) -> Image.Image:
        shard, entry = self._place(index)
        file = self._file(self._shards[shard])
        try:
            data = os.pread(file.descriptor, int(entry["size"]), int(entry["offset"]))
        except OSError as error:
            raise CorruptImageError(self._path(index), str(error)) from error
        return decode(self._path(index), self.size, io.BytesIO(data))

    def _path(self, index: int) -> Path:
        shard, entry = self._place(index)
        return self._shards[shard] / os.fsdecode(entry["name"])

    def _place(self, index: int) -> tuple[int, Any]:
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        return shard, self._entries[shard][index - self._starts[shard]]


class _ShardFile:
    """An open shard, closed with its last reference; shared by threads and forked processes.

    Raises:
        UserError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        try:
            self.descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise UserError(f"{path}: cannot be opened ({error}). Check --data-dir.") from error
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # os may be gone at exit
        if hasattr(self, "descriptor"):
            close(self.descriptor)


@lru_cache(maxsize=4)
def _order(sizes: tuple[int, ...], epoch: int, workers: int, seed: int, window: int) -> Int64Array:
    """Return the order of samples: shards shuffled by the seed, divided among the workers.

    Each worker reads its part sequentially; its first and last shard may be shared with a
    neighbour. Within the part, a sample is moved by less than ``window`` places, as by a shuffle
    buffer of that size.
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
    """Return the samples, each delayed by a random number of places below ``window``."""
    draws = sample_keys(seed, SHUFFLING, epoch, part) >> np.uint64(11)
    places = np.arange(len(part)) + draws.astype(np.float64) * (window / 2.0**53)
    moved: Int64Array = part[np.argsort(places, kind="stable")]
    return moved
