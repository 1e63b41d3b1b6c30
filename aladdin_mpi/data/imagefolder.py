"""Folders of images: ``DIR/train/CLASS/*`` and ``DIR/test/CLASS/*`` or ``DIR/val/CLASS/*``."""

from __future__ import annotations

import hashlib
import json
import os
import time
from bisect import bisect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from aladdin_mpi.data.augment import Recipe, SmallImages
from aladdin_mpi.data.host_cache import cached_array, index_dir, one_at_a_time
from aladdin_mpi.data.images import (
    CorruptImageError,
    ImageArrays,
    ImageFiles,
    SkippedImages,
    decode,
)
from aladdin_mpi.errors import UserError
from aladdin_mpi.process.files import write_whole

UNSURE = 2.0
"""Seconds within which a folder may change again without a change of its timestamp."""


class ScannedFolder(NamedTuple):
    """File ``names`` and ``folders`` below the root, and the folders' times of change."""

    names: list[str]
    folders: list[str]
    changed: list[int]


def files_below(root: Path, is_wanted: Callable[[str], bool]) -> list[str]:
    """Return the files below ``root``, class folder by class folder, sorted.

    Args:
        root: contains the class folders; files directly in it are ignored.
        is_wanted: returns whether to list a file of this name; the same function at every call.
    """
    resolved = root.resolve()
    digest = hashlib.sha256(os.fsencode(resolved)).hexdigest()[:32]
    path = index_dir(resolved) / f"folder-{digest}.json"
    called = time.time_ns()
    try:
        with one_at_a_time(path):  # the other ranks of the host wait, and then read the index
            checked = time.time_ns()
            kept = _load(path)
            if kept is not None and _is_just_checked(path, root, kept, called):
                return kept.names
            if kept is None or not _is_current(root, kept):
                kept = _walk(root, is_wanted)
                if max(kept.changed, default=0) >= (time.time() - UNSURE) * 1e9:
                    return kept.names
                write_whole(path, json.dumps(kept))
            os.utime(path, ns=(checked, checked))
            return kept.names
    except OSError:  # a cache that cannot be written
        return _walk(root, is_wanted).names


def _walk(root: Path, is_wanted: Callable[[str], bool]) -> ScannedFolder:
    names: list[str] = []
    folders, changed = ["."], [root.stat().st_mtime_ns]
    for name in class_names(root):
        files_of_class = []
        for folder, _, files in os.walk(root / name):
            inside = os.path.relpath(folder, root)
            folders.append(inside)
            changed.append(os.stat(folder).st_mtime_ns)
            files_of_class += [f"{inside}/{each}" for each in files if is_wanted(each)]
        names += sorted(files_of_class)
    return ScannedFolder(names, folders, changed)


def _load(path: Path) -> ScannedFolder | None:
    try:
        return ScannedFolder(*json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return None


def _is_current(root: Path, kept: ScannedFolder) -> bool:
    try:
        return [(root / folder).stat().st_mtime_ns for folder in kept.folders] == kept.changed
    except OSError:
        return False


def _is_just_checked(path: Path, root: Path, kept: ScannedFolder, called: int) -> bool:
    """Return whether another rank has checked the index while this one waited.

    The root's time is compared because a rank of another host may have read another disk.
    """
    return path.stat().st_mtime_ns >= called and root.stat().st_mtime_ns == kept.changed[0]


SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
SMALL = 64
"""Images of at most this many pixels a side, all of one size, are small."""
MEMORY_LIMIT = 2 * 2**30
"""With ``cache="auto"``, decoded sets of at most this many bytes are held in memory."""


@dataclass(frozen=True)
class SplitListing:
    """The files of a split in a fixed order: names below ``root``, and labels."""

    root: Path
    names: Sequence[str]
    labels: Sequence[int]

    def path(self, index: int) -> Path:
        """Return the path of a file."""
        return self.root / self.names[index]


class Fault(NamedTuple):
    """An unreadable image: its split (0: train), its index among the files, and the reason."""

    split: int
    place: int
    why: str


def list_splits(data_dir: Path | None) -> tuple[list[SplitListing], list[str]]:
    """Return the training and test images, and the names of the classes.

    Raises:
        UserError: ``--data-dir`` is missing, has another layout, no images in a split, or a test
            class without training images.
    """
    layout = "expected DIR/train/CLASS/* and DIR/test/CLASS/* (or DIR/val/CLASS/*)"
    if data_dir is None:
        raise UserError(f"--dataset imagefolder requires --data-dir; {layout}")
    train = data_dir / "train"
    test = next((data_dir / name for name in ("test", "val") if (data_dir / name).is_dir()), None)
    if not train.is_dir():
        raise UserError(f"--data-dir {data_dir}: the folder {train} is missing; {layout}")
    if test is None:
        raise UserError(f"--data-dir {data_dir}: neither a folder test nor val exists; {layout}")
    classes = class_names(train)
    return [list_images(split, classes) for split in (train, test)], classes


def class_names(root: Path) -> list[str]:
    """Return the names of the class folders in ``root``, sorted."""
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir())


def list_images(root: Path, classes: Sequence[str]) -> SplitListing:
    """Find the images below ``root``; ``classes`` are those of the training set.

    Raises:
        UserError: no images, or a class that is not in ``classes``.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    unknown = [name for name in class_names(root) if name not in numbers]
    if unknown:
        raise UserError(
            f"--data-dir: {root} has a class {unknown[0]!r} that is not in train. Remove it, or "
            "add it to train."
        )
    names = files_below(root, lambda name: name.lower().endswith(SUFFIXES))
    if not names:
        raise UserError(
            f"--data-dir: no images in {root}/CLASS/; expected files with the suffixes "
            f"{' '.join(SUFFIXES)}"
        )
    return SplitListing(root, names, [numbers[name.partition("/")[0]] for name in names])


def common_small_size(listings: Sequence[SplitListing], skip: bool) -> tuple[int, int] | None:
    """Return (width, height) if the images are small and of one size, else None.

    Only the first image of each class is opened (with ``skip``, the first readable one), as a
    large dataset has too many.
    """
    sizes = set()
    for listing in listings:
        for first in np.unique(np.array(listing.labels), return_index=True)[1].tolist():
            size = _first_size(listing, first, skip)
            if size is not None:
                sizes.add(size)
                if len(sizes) > 1 or max(size) > SMALL:
                    return None
    return sizes.pop() if sizes else None


def _first_size(listing: SplitListing, first: int, skip: bool) -> tuple[int, int] | None:
    """Return the size of the first image of a class, which begins at ``first``."""
    for index in range(first, len(listing.labels)):
        if listing.labels[index] != listing.labels[first]:
            break
        try:
            return decode(listing.path(index)).size
        except CorruptImageError:
            if not skip:
                raise
    return None


def is_held(listing: SplitListing, size: tuple[int, int] | None, cache: str) -> bool:
    """Return whether the images are decoded once and held in memory.

    Raises:
        UserError: ``cache`` is "on", and the images have no common small ``size``.
    """
    if size is None:
        if cache == "on":
            raise UserError(
                f"--cache on requires small images of one size, but those of {listing.root} "
                f"differ in size or are larger than {SMALL} pixels. Use --cache auto."
            )
        return False
    fits = len(listing.names) * 3 * size[0] * size[1] <= MEMORY_LIMIT
    return cache == "on" or (cache == "auto" and fits)


def load_split(
    listing: SplitListing,
    recipe: Recipe,
    size: tuple[int, int] | None,
    cache: str,
    skipped: SkippedImages | None = None,
) -> ImageArrays | ImageFiles:
    """Return a split, held in memory if ``cache`` is "on", or "auto" and it fits."""
    if not is_held(listing, size, cache):
        must_be = size if isinstance(recipe, SmallImages) else None
        return ImageFiles(listing.root, listing.names, listing.labels, recipe, must_be, skipped)
    assert size is not None
    pixels = cached_array(fingerprint(listing), lambda: _decode_all(listing, size))
    labels = torch.tensor(listing.labels, dtype=torch.int64)
    return ImageArrays(torch.from_numpy(pixels), labels, recipe, skipped)


def _decode_all(listing: SplitListing, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Return all images as one array (N, 3, H, W); ``size`` is (width, height)."""
    pixels = np.empty((len(listing.names), 3, size[1], size[0]), dtype=np.uint8)
    for i in range(len(pixels)):
        pixels[i] = np.asarray(decode(listing.path(i), size)).transpose(2, 0, 1)
    return pixels


def fingerprint(listing: SplitListing) -> str:
    """Return a name for the decoded images that changes if any file changes."""
    digest = hashlib.sha256(b"uint8 NCHW RGB, version 2")
    # Other folders may have files of the same names, sizes and times.
    digest.update(os.fsencode(listing.root.resolve()) + b"\n")
    for index, name in enumerate(listing.names):
        try:
            state = listing.path(index).stat()
            known = f"{state.st_size}\0{state.st_mtime_ns}"
        except OSError as error:  # a dangling link, for example, which decoding reports
            known = f"errno {error.errno}"
        digest.update(os.fsencode(f"{name}\0{known}\n"))
    return f"imagefolder-{digest.hexdigest()[:32]}"


# -- unreadable images --------------------------------------------------------------------------
def unreadable(listing: SplitListing) -> dict[int, str]:
    """Return the indices of unreadable images, and the reasons.

    All images are decoded, once per host and state of the files.
    """

    def find() -> npt.NDArray[np.uint8]:
        faults = (fault(listing.path(i)) for i in range(len(listing.names)))
        return np.array([why is not None for why in faults], dtype=np.uint8)

    faulty = np.flatnonzero(cached_array(f"{fingerprint(listing)}-faults", find)).tolist()
    reasons = {index: fault(listing.path(index)) for index in faulty}
    return {index: why for index, why in reasons.items() if why is not None}


def fault(path: Path) -> str | None:
    """Return the reason why an image is unreadable; None if it is readable."""
    try:
        decode(path)
    except CorruptImageError as error:
        return error.why
    return None


def mended(listing: SplitListing, faults: Collection[int], replaces: bool) -> SplitListing:
    """Return the split without unreadable images.

    With ``replaces``, the next readable image replaces each, as in :class:`ImageFiles`.
    """
    places = range(len(listing.names))
    chosen = readable = [i for i in places if i not in faults]
    if not readable:
        raise UserError(
            f"--corrupt-images skip: expected readable images in {listing.root}, got "
            f"{len(faults)} of which none is; check --data-dir"
        )
    if replaces:
        following = (readable[bisect(readable, i) % len(readable)] for i in places)
        chosen = [other if i in faults else i for i, other in zip(places, following, strict=True)]
    names, labels = listing.names, listing.labels
    return SplitListing(listing.root, [names[i] for i in chosen], [labels[i] for i in chosen])
