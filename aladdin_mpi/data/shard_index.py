"""What lies where in shards: tar files of images with their labels, in WebDataset's layout.

The files of a sample lie one behind the other and have one name up to the first dot of its last
part: ``n01440764_10026.jpg``, ``n01440764_10026.cls``. A label is a number, in a file ``cls`` or,
where there is none, as ``label`` or ``cls`` in one called ``json``.

Only the headers are read, once for each shard and host: its index is kept where :func:`.index_dir`
says.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aladdin_mpi.data.host_cache import cached_array, index_dir
from aladdin_mpi.errors import UserError

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
