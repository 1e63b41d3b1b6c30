"""Folders of images: ``DIR/train/CLASS/*`` and ``DIR/test/CLASS/*`` or ``DIR/val/CLASS/*``."""

from __future__ import annotations

import hashlib
import os
import time
from bisect import bisect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import torch

from aladdin_mpi.data.augment import LargeImages, SmallImages
from aladdin_mpi.data.host_cache import cached_array, index_dir, one_at_a_time
from aladdin_mpi.data.images import (
    CorruptImageError,
    ImageArrays,
    ImageFiles,
    SkippedImages,
    decode,
)
from aladdin_mpi.errors import UserError
from aladdin_mpi.process.files import written_whole

UNSURE = 2.0
"""Seconds within which a folder may change again without its time telling."""


class ScannedFolder(NamedTuple):
    """``names`` of files and of all ``folders``, below the root; when each of these was changed."""

    names: list[str]
    folders: list[str]
    changed: list[int]


def files_below(root: Path, is_wanted: Callable[[str], bool]) -> list[str]:
    """Return the files below ``root``, class folder by class folder, sorted.

    Args:
        root: holds the class folders; files in itself do not count.
        is_wanted: whether a file of this name does; the same at every call.
    """
    resolved = root.resolve()
    digest = hashlib.sha256(os.fsencode(resolved)).hexdigest()[:32]
    path = index_dir(resolved) / f"folder-{digest}.npz"
    asked = time.time_ns()
    try:
        with one_at_a_time(path):  # the other ranks of the host wait, and then read
            looked = time.time_ns()
            kept = _load(path)
            if kept is not None and _is_just_seen(path, root, kept, asked):
                return kept.names
            if kept is not None and _is_current(root, kept):
                _note(path, looked)
                return kept.names
            found = _walk(root, is_wanted)
            if max(found.changed, default=0) < (time.time() - UNSURE) * 1e9:
                _save(path, found)
                _note(path, looked)
    except OSError:  # a cache that cannot be written
        return _walk(root, is_wanted).names
    return found.names


def _walk(root: Path, is_wanted: Callable[[str], bool]) -> ScannedFolder:
    names: list[str] = []
    folders, changed = ["."], [root.stat().st_mtime_ns]
    with os.scandir(root) as entries:
        classes = sorted(entry.name for entry in entries if entry.is_dir())
    for name in classes:
        found = []
        for folder, _, files in os.walk(root / name):
            inside = os.path.relpath(folder, root)
            folders.append(inside)
            changed.append(os.stat(folder).st_mtime_ns)
            found += [f"{inside}/{each}" for each in files if is_wanted(each)]
        names += sorted(found)
    return ScannedFolder(names, folders, changed)


def _is_current(root: Path, kept: ScannedFolder) -> bool:
    try:
        now = [(root / folder).stat().st_mtime_ns for folder in kept.folders]
    except OSError:
        return False
    return now == kept.changed


def _note(path: Path, looked: int) -> None:
    """Keep, as the time of the index, when a rank has begun to look at the folders."""
    os.utime(path, ns=(looked, looked))


def _is_just_seen(path: Path, root: Path, kept: ScannedFolder, asked: int) -> bool:
    """Whether another rank has looked while this one waited.

    One of another host, with the same cache folder, may have looked at another disk.
    """
    return path.stat().st_mtime_ns >= asked and root.stat().st_mtime_ns == kept.changed[0]


def _save(path: Path, found: ScannedFolder) -> None:
    with written_whole(path) as temporary, temporary.open("wb") as file:
        np.savez(
            file,
            names=_packed(found.names),
            folders=_packed(found.folders),
            changed=np.array(found.changed, dtype=np.int64),
        )


def _load(path: Path) -> ScannedFolder | None:
    try:
        with np.load(path) as kept:
            names, folders = (list(_unpacked(kept[name])) for name in ("names", "folders"))
            return ScannedFolder(names, folders, kept["changed"].tolist())
    except (OSError, ValueError, KeyError, BadZipFile):
        return None


def _packed(names: list[str]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"\0".join(map(os.fsencode, names)), dtype=np.uint8)


def _unpacked(data: npt.NDArray[np.uint8]) -> Iterator[str]:
    text = data.tobytes()
    return map(os.fsdecode, text.split(b"\0")) if text else iter(())


SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
SMALL = 64
"""Images of at most this many pixels a side, all of one size, are small."""
MEMORY_LIMIT = 2 * 2**30
"""With ``cache="auto"``, decoded sets of at most this many bytes are held in memory."""


@dataclass(frozen=True)
class SplitListing:
    """The files of one split, in a fixed order: names below ``root``, and labels."""

    root: Path
    names: Sequence[str]
    labels: Sequence[int]

    def path(self, index: int) -> Path:
        """Of one file."""
        return self.root / self.names[index]

    def taking(self, indices: Sequence[int]) -> SplitListing:
        """Return those of ``indices``, in their order; some may come twice."""
        names = [self.names[i] for i in indices]
        return SplitListing(self.root, names, [self.labels[i] for i in indices])


class Fault(NamedTuple):
    """An image that cannot be read: which split's (0: train), which of its files, and why."""

    split: int
    place: int
    why: str


def list_splits(data_dir: Path | None) -> tuple[list[SplitListing], list[str]]:
    """Return the images to train and to test with, and the names of the classes.

    Raises:
        UserError: as :func:`find_splits` and :func:`list_images`.
    """
    train, test = find_splits(data_dir)
    classes = class_names(train)
    return [list_images(split, classes) for split in (train, test)], classes


def find_splits(data_dir: Path | None) -> tuple[Path, Path]:
    """Return the folders of the training and the test images.

    Raises:
        UserError: if ``--data-dir`` is missing or has another layout.
    """
    layout = "expected DIR/train/CLASS/* and DIR/test/CLASS/* (or DIR/val/CLASS/*)"
    if data_dir is None:
        raise UserError(f"--data-dir: data set imagefolder needs it; {layout}")
    train = data_dir / "train"
    test = next((data_dir / name for name in ("test", "val") if (data_dir / name).is_dir()), None)
    if not train.is_dir():
        raise UserError(f"--data-dir {data_dir}: there is no folder {train}; {layout}")
    if test is None:
        raise UserError(f"--data-dir {data_dir}: there is neither a folder test nor val; {layout}")
    return train, test


def class_names(root: Path) -> list[str]:
    """Return the names of the class folders in ``root``, sorted."""
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir())


def list_images(root: Path, classes: Sequence[str]) -> SplitListing:
    """Find the images below ``root``; ``classes`` are those of the training set.

    Raises:
        UserError: if there are none, or a class that is not in ``classes``.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    unknown = [name for name in class_names(root) if name not in numbers]
    if unknown:
        raise UserError(f"--data-dir: {root} has a class {unknown[0]!r} that is not in train")
    names = files_below(root, _is_image)
    if not names:
        raise UserError(f"--data-dir: no images in {root}/CLASS/; known: {' '.join(SUFFIXES)}")
    return SplitListing(root, names, [numbers[name.partition("/")[0]] for name in names])


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


def common_small_size(listings: Sequence[SplitListing], skip: bool) -> tuple[int, int] | None:
    """Return (width, height) if the images are small and of one size, else None.

    Only the first image of each class is opened, with ``skip`` the first that can be read: a
    large set has too many.
    """
    sizes = set()
    for listing in listings:
        for first in np.unique(np.array(listing.labels), return_index=True)[1]:
            size = _first_size(listing, int(first), skip)
            if size is None:
                continue
            sizes.add(size)
            if len(sizes) > 1 or max(max(sizes)) > SMALL:
                return None
    return sizes.pop() if sizes else None


def _first_size(listing: SplitListing, first: int, skip: bool) -> tuple[int, int] | None:
    """Of the first image of a class, which begins at ``first``."""
    if not skip:
        return decode(listing.path(first)).size
    index, label = first, listing.labels[first]
    while index < len(listing.labels) and listing.labels[index] == label:
        try:
            return decode(listing.path(index)).size
        except CorruptImageError:
            index += 1
    return None


def is_held(listing: SplitListing, size: tuple[int, int] | None, cache: str) -> bool:
    """Whether the images are decoded once and held in memory.

    Raises:
        UserError: ``cache`` asks for it, and they have no common small ``size``.
    """
    if size is None:
        if cache == "on":
            raise UserError(
                f"--cache on: the images of {listing.root} differ in size or are larger than "
                f"{SMALL} pixels and are decoded as they are needed; use --cache auto"
            )
        return False
    fits = len(listing.names) * 3 * size[0] * size[1] <= MEMORY_LIMIT
    return cache == "on" or (cache == "auto" and fits)


def load_split(
    listing: SplitListing,
    recipe: SmallImages | LargeImages,
    size: tuple[int, int] | None,
    cache: str,
    skipped: SkippedImages | None = None,
) -> ImageArrays | ImageFiles:
    """Return one split, in memory where ``cache`` asks for it or, if "auto", it fits."""
    if not is_held(listing, size, cache):
        must_be = size if isinstance(recipe, SmallImages) else None
        return ImageFiles(listing.root, listing.names, listing.labels, recipe, must_be, skipped)
    assert size is not None
    pixels = cached_array(fingerprint(listing), lambda: decode_all(listing, size))
    labels = torch.tensor(listing.labels, dtype=torch.int64)
    return ImageArrays(torch.from_numpy(pixels), labels, recipe, skipped)


# -- images that cannot be read -----------------------------------------------------------------
def unreadable(listing: SplitListing) -> dict[int, str]:
    """The images that cannot be read, by their place, and why.

    All are decoded, once for each host and state of the files.
    """

    def look() -> npt.NDArray[np.uint8]:
        faults = (fault(listing.path(i)) for i in range(len(listing.names)))
        return np.array([why is not None for why in faults], dtype=np.uint8)

    found = np.flatnonzero(cached_array(f"{fingerprint(listing)}-faults", look)).tolist()
    reasons = {index: fault(listing.path(index)) for index in found}
    return {index: why for index, why in reasons.items() if why is not None}


def fault(path: Path) -> str | None:
    """Why an image cannot be read; None: it can."""
    try:
        decode(path)
    except CorruptImageError as error:
        return error.why
    return None


def with_stand_ins(listing: SplitListing, faults: Collection[int]) -> SplitListing:
    """Put the next image in for each that cannot be read, as :class:`ImageFiles` does."""
    _check_some_left(listing, faults)
    count = len(listing.names)
    sound = [i for i in range(count) if i not in faults]
    return listing.taking(
        [sound[bisect(sound, i) % len(sound)] if i in faults else i for i in range(count)]
    )


def without(listing: SplitListing, faults: Collection[int]) -> SplitListing:
    """Leave out those that cannot be read."""
    _check_some_left(listing, faults)
    return listing.taking([i for i in range(len(listing.names)) if i not in faults])


def _check_some_left(listing: SplitListing, faults: Collection[int]) -> None:
    if len(faults) == len(listing.names):
        raise UserError(
            f"--corrupt-images skip: expected readable images in {listing.root}, got "
            f"{len(faults)} of which none is; look at --data-dir"
        )


# -- decoded sets -------------------------------------------------------------------------------
def fingerprint(listing: SplitListing) -> str:
    """Return a name for the decoded images that changes when any of the files does."""
    digest = hashlib.sha256(b"uint8 NCHW RGB, version 1")
    for name in listing.names:
        digest.update(os.fsencode(f"{name}\0{_state(listing.root / name)}\n"))
    return f"imagefolder-{digest.hexdigest()[:32]}"


def _state(path: Path) -> str:
    try:
        state = path.stat()
    except OSError as error:  # such as a link to nowhere; decoding it says what is wrong
        return f"errno {error.errno}"
    return f"{state.st_size}\0{state.st_mtime_ns}"


def decode_all(listing: SplitListing, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Return all images as one array (N, 3, H, W); ``size`` is (width, height)."""
    pixels = np.empty((len(listing.names), 3, size[1], size[0]), dtype=np.uint8)
    for i, name in enumerate(listing.names):
        pixels[i] = np.asarray(decode(listing.root / name, size)).transpose(2, 0, 1)
    return pixels
