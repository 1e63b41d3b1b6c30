"""What lies where in shards: tar files of images with their labels, in WebDataset's layout.

The files of a sample lie one behind the other and have one name up to the first dot of its last
part: ``n01440764_10026.jpg``, ``n01440764_10026.cls``. A label is a number, in a file ``cls`` or
as ``label`` or ``cls`` in one called ``json``.

Only the headers are read, once for each shard and host: its index is kept in the cache folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aladdin_mpi.data.host_cache import cached_array
from aladdin_mpi.errors import UserError

IMAGES = ("jpg", "jpeg", "png", "webp", "ppm", "bmp")
LABELS = ("cls", "json")
LAYOUT = (
    "expected DIR/train/*.tar and DIR/test/*.tar (or val), or DIR/train-*.tar and DIR/val-*.tar"
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
    return sorted((data_dir / name).glob("*.tar")) or sorted(data_dir.glob(f"{name}*.tar"))


def indexed(shards: Sequence[Path]) -> list[Entries]:
    """The entries of each shard.

    Raises:
        UserError: one cannot be read, or has a sample without an image or label.
    """
    # The ranks of a host begin at different places, and each shard is read by one of them.
    first = os.getpid() % len(shards)
    found: dict[Path, Entries] = {}
    for shard in [*shards[first:], *shards[:first]]:
        found[shard] = _cached(shard)
    return [found[shard] for shard in shards]


def _cached(shard: Path) -> Entries:
    state = shard.stat()
    seen = f"shard index, version 1\0{shard.resolve()}\0{state.st_size}\0{state.st_mtime_ns}"
    digest = hashlib.sha256(os.fsencode(seen)).hexdigest()[:32]
    raw = cached_array(f"shard-{digest}", lambda: _read(shard).view(np.uint8))
    return raw.view(ENTRY)


def _read(shard: Path) -> Entries:
    entries = list(_samples(shard))
    if not entries:
        raise UserError(f"{shard}: expected samples of an image and a label, got none")
    return np.array(entries, dtype=ENTRY)


def _samples(shard: Path) -> Iterator[tuple[int, int, int, bytes]]:
    """Each sample, when the files of the next one begin."""
    key = ""
    parts: dict[str, Any] = {}
    try:
        with tarfile.open(shard, "r:") as archive:
            for member in archive:
                if not member.isfile():
                    continue
                name, suffix = _split(member.name)
                if name != key and parts:
                    yield _entry(shard, key, parts)
                    parts = {}
                key = name
                if suffix in IMAGES:
                    parts["image"] = (member.offset_data, member.size, member.name)
                elif suffix in LABELS:
                    parts["label"] = _label(shard, member.name, _content(archive, member))
            if parts:
                yield _entry(shard, key, parts)
    except (tarfile.TarError, OSError) as error:
        raise UserError(
            f"{shard}: cannot be read as a tar file ({error}); shards are not compressed; replace "
            "or remove it"
        ) from error


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    return b"" if file is None else file.read()


def _split(name: str) -> tuple[str, str]:
    folder, _, last = name.rpartition("/")
    stem, _, suffix = last.partition(".")
    return f"{folder}/{stem}", suffix.lower()


def _label(shard: Path, name: str, content: bytes) -> int:
    try:
        if name.lower().endswith("json"):
            found = json.loads(content)
            return int(found["label"] if "label" in found else found["cls"])
        return int(content)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{shard}: expected the number of a class in {name}, got {content[:40]!r}"
        ) from error


def _entry(shard: Path, key: str, parts: dict[str, Any]) -> tuple[int, int, int, bytes]:
    for part in ("image", "label"):
        if part not in parts:
            known = " ".join(IMAGES if part == "image" else LABELS)
            raise UserError(
                f"{shard}: expected an {part} of sample {key.lstrip('/')}, got none; known are "
                f"{known}".replace("an label", "a label")
            )
    offset, size, name = parts["image"]
    return offset, size, parts["label"], os.fsencode(name)[-NAME_BYTES:]
