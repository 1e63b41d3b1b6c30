"""Folders of images: ``DIR/train/CLASS/*`` and ``DIR/test/CLASS/*`` or ``DIR/val/CLASS/*``."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from aladdin_mpi.errors import UserError
from aladdin_mpi.training.augment import CIFAR10, LargeImages, SmallImages
from aladdin_mpi.training.host_cache import cached_array
from aladdin_mpi.training.images import ImageArrays, ImageFiles, decode

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
SMALL = 64
"""Images of at most this many pixels a side, all of one size, are small."""
MEMORY_LIMIT = 2 * 2**30
"""With ``cache="auto"``, decoded sets of at most this many bytes are held in memory."""


@dataclass(frozen=True)
class Listing:
    """The files of one split, in a fixed order: names below ``root``, and labels."""

    root: Path
    names: Sequence[str]
    labels: Sequence[int]


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


def list_images(root: Path, classes: Sequence[str]) -> Listing:
    """Find the images below ``root``; ``classes`` are those of the training set.

    Raises:
        UserError: if there are none, or a class that is not in ``classes``.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    unknown = [name for name in class_names(root) if name not in numbers]
    if unknown:
        raise UserError(f"--data-dir: {root} has a class {unknown[0]!r} that is not in train")
    names: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = _images_below(root, name)
        names += found
        labels += [label] * len(found)
    if not names:
        raise UserError(f"--data-dir: no images in {root}/CLASS/; known: {' '.join(SUFFIXES)}")
    return Listing(root, names, labels)


def _images_below(root: Path, name: str) -> list[str]:
    found = []
    for folder, _, files in os.walk(root / name):
        inside = os.path.relpath(folder, root)
        found += [f"{inside}/{each}" for each in files if each.lower().endswith(SUFFIXES)]
    return sorted(found)


def common_small_size(listings: Sequence[Listing]) -> tuple[int, int] | None:
    """Return (width, height) if the images are small and of one size, else None.

    Only the first image of each class is opened: a large set has too many.
    """
    sizes = set()
    for listing in listings:
        for first in np.unique(np.array(listing.labels), return_index=True)[1]:
            sizes.add(decode(listing.root / listing.names[first]).size)
            if len(sizes) > 1 or max(max(sizes)) > SMALL:
                return None
    return sizes.pop()


def load_split(
    listing: Listing, recipe: SmallImages | LargeImages, size: tuple[int, int] | None, cache: str
) -> ImageArrays | ImageFiles:
    """Return one split, in memory where ``cache`` asks for it or, if "auto", it fits."""
    if not isinstance(recipe, SmallImages) or size is None:
        if cache == "on":
            raise UserError(
                f"--cache on: the images of {listing.root} differ in size or are larger than "
                f"{SMALL} pixels and are decoded as they are needed; use --cache auto"
            )
        return ImageFiles(listing.root, listing.names, listing.labels, recipe)
    fits = len(listing.names) * 3 * size[0] * size[1] <= MEMORY_LIMIT
    if cache == "off" or (cache == "auto" and not fits):
        return ImageFiles(listing.root, listing.names, listing.labels, recipe, size)
    pixels = cached_array(fingerprint(listing), lambda: decode_all(listing, size))
    labels = torch.tensor(listing.labels, dtype=torch.int64)
    return ImageArrays(torch.from_numpy(pixels), labels, recipe)


def fingerprint(listing: Listing) -> str:
    """Return a name for the decoded images that changes when any of the files does."""
    digest = hashlib.sha256(b"uint8 NCHW RGB, version 1")
    for name in listing.names:
        state = (listing.root / name).stat()
        digest.update(os.fsencode(f"{name}\0{state.st_size}\0{state.st_mtime_ns}\n"))
    return f"imagefolder-{digest.hexdigest()[:32]}"


def decode_all(listing: Listing, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Return all images as one array (N, 3, H, W); ``size`` is (width, height)."""
    pixels = np.empty((len(listing.names), 3, size[1], size[0]), dtype=np.uint8)
    for i, name in enumerate(listing.names):
        pixels[i] = np.asarray(decode(listing.root / name, size)).transpose(2, 0, 1)
    return pixels


def choose_recipe(
    size: tuple[int, int] | None, image_size: int | None
) -> SmallImages | LargeImages:
    """Return CIFAR's recipe for small images of one ``size``, otherwise ImageNet's."""
    if size is None:
        return LargeImages(image_size=image_size or 224)
    return SmallImages(CIFAR10, pad=size[1] // 8, flip=True, image_size=image_size)
