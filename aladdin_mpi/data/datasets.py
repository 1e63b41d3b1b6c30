"""Datasets by name: ``load_dataset`` and its results."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from aladdin_mpi.data import builtin_sets, imagefolder
from aladdin_mpi.data.augment import CIFAR10, CLASSES, LargeImages, Policy, Recipe, SmallImages
from aladdin_mpi.data.builtin_sets import VISION_SETS, Description, parse_synthetic
from aladdin_mpi.data.imagefolder import Fault, SplitListing
from aladdin_mpi.data.images import ImageArrays, SkippedImages
from aladdin_mpi.data.shards import ShardImages, find_shards, indexed
from aladdin_mpi.data.user_code import call_with_accepted, import_function
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.fields import kebab
from aladdin_mpi.options.general import SHUFFLE_BUFFER, Augment
from aladdin_mpi.options.settings import did_you_mean

CHOICES = get_args(Augment)


def for_folder(size: tuple[int, int] | None, image_size: int | None, augment: str) -> Recipe:
    """Return CIFAR's recipe for small images of one (width, height), otherwise ImageNet's."""
    if size is not None:
        recipe = SmallImages(CIFAR10, pad=size[1] // 8, flip=True, image_size=image_size)
        return _small(recipe, size[1], augment)
    policy = Policy(augment, "IMAGENET") if augment in CLASSES else None
    crop: Literal["zoom", "shift", "none"] = "zoom"
    if augment in ("none", "crop-flip"):
        crop = "none" if augment == "none" else "shift"
    return LargeImages(image_size=image_size or 224, crop=crop, policy=policy)


def _small(recipe: SmallImages, height: int, augment: str) -> Recipe:
    if augment == "none":
        return replace(recipe, pad=0, flip=False)
    if augment == "crop-flip":
        return replace(recipe, pad=max(1, height // 8), flip=True)
    if augment == "imagenet":
        return LargeImages(recipe.normalisation, recipe.image_size or height)
    return replace(recipe, policy=Policy(augment, "CIFAR10") if augment in CLASSES else None)


def with_augmentation(arrays: ImageArrays, augment: str) -> ImageArrays:
    """Return ``arrays`` with the recipe for ``augment``.

    Raises:
        UserError: the augmentation does not support the number of channels.
    """
    if augment == "auto":
        return arrays
    images, recipe = arrays.images, arrays.recipe
    assert isinstance(recipe, SmallImages)
    channels, height = images.shape[1:3]
    if augment in {"imagenet", *CLASSES}:  # for decoded images: grey or RGB, of pixels up to 255
        if channels not in (1, 3):
            raise UserError(
                f"--augment {augment}: expected images of 1 or 3 channels, got {channels}; use "
                "auto, none or crop-flip"
            )
        maximum = recipe.normalisation.maximum
        if maximum != 255 and isinstance(images, Tensor):
            images = (images * (255 / maximum)).round().to(images.dtype)
            recipe = replace(recipe, normalisation=replace(recipe.normalisation, maximum=255.0))
    return ImageArrays(images, arrays.targets, _small(recipe, height, augment))


NAMES = ("digits", *VISION_SETS, "imagefolder", "shards", "synthetic")
IMAGENET = Description(1_281_167, 1000, 3, 224)


class MapDataset(Protocol):
    """A map-style dataset: ``dataset[i]`` is (input, label).

    A dataset with random augmentation draws from the global generators of torch, Python or numpy,
    which are seeded for each (run seed, epoch, sample). Alternatively it has a method
    ``augmented(index, key)`` for the training view of a sample, determined by a 64-bit ``key``.
    """

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int, /) -> Any:
        """Return sample ``index``."""


@dataclass(frozen=True)
class DatasetPair:
    """Training and test data.

    ``image_size`` is the height in pixels; it and ``in_channels`` are 0 if inputs are not images.
    """

    train: MapDataset
    test: MapDataset
    num_classes: int
    in_channels: int
    image_size: int
    name: str


def load_dataset(
    name: str,
    data_dir: Path | None = None,
    download: bool = False,
    image_size: int | None = None,
    cache: str = "auto",
    augment: str = "auto",
    corrupt_images: str = "stop",
    faults: tuple[Fault, ...] | None = None,
    shuffle_buffer: int = SHUFFLE_BUFFER,
) -> DatasetPair:
    """Return the dataset ``name``; the ranks of one process share it.

    Args:
        name: ``digits``, ``mnist``, ``fashion-mnist``, ``cifar10``, ``cifar100``,
            ``imagefolder``, ``shards``, ``synthetic``, ``synthetic:CxHxW:CLASSES:COUNT``, or
            ``package.module:function``. A function receives those of ``data_dir``, ``download``,
            ``image_size`` and ``augment`` for which it has parameters, and returns a
            :class:`DatasetPair` or (train, test).
        data_dir: folder of the data; by default in the cache folder.
        download: whether to download missing data.
        image_size: side in pixels to which images are scaled. None: unchanged, or 224 for
            folders of large images.
        cache: for folders of small images: ``on`` decodes them once into memory and into the
            cache folder, ``off`` decodes as needed, ``auto`` is ``on`` for up to 2 GiB decoded.
            Large images are always decoded as needed.
        augment: one of :data:`CHOICES`; ``auto`` is described below.
        corrupt_images: for ``imagefolder`` and ``shards``: ``stop`` raises an error at an
            unreadable image; ``skip`` records it, replaces it by the next one in the training set,
            and leaves it out of :func:`.loading.test_batches`.
        faults: the unreadable images; None if they have not been checked.
        shuffle_buffer: for ``shards``: a sample is moved by less than this many places from its
            position in the shard; 1 keeps the order.

    With ``auto``, small images (of one size, at most 64 pixels) are cropped after padding by an
    eighth of their height, and mirrored; larger ones get ImageNet's recipe.

    Raises:
        UserError: an unknown name, missing or invalid data, or an invalid option.
    """
    if image_size is not None and image_size < 1:
        raise UserError(
            f"--image-size: expected at least 1 pixel, got {image_size}; leave it out to keep the "
            "images' own size"
        )
    if shuffle_buffer < 1:
        raise UserError(
            f"--shuffle-buffer: expected at least 1 sample, got {shuffle_buffer}; use 1 to read "
            "each shard in order"
        )
    for flag, value, choices in (
        ("--cache", cache, ("auto", "on", "off")),
        ("--augment", augment, CHOICES),
        ("--corrupt-images", corrupt_images, ("stop", "skip")),
    ):
        if value not in choices:
            raise UserError(f"{flag}: expected one of {', '.join(choices)}, got {value!r}")
    view, skip = View(image_size, augment), corrupt_images == "skip"
    with _LOADING:
        if name == "imagefolder":
            return _load_imagefolder(data_dir, view, cache, skip, faults)
        if name == "shards":
            return _load_shards(data_dir, view, skip, shuffle_buffer)
        return _load(name, data_dir, download, view)


# Reentrant, because a user's data function may load a built-in dataset.
_LOADING = threading.RLock()


class View(NamedTuple):
    """The view of images: the options ``--image-size`` and ``--augment``."""

    image_size: int | None
    augment: str


@lru_cache(maxsize=4)
def _load(name: str, data_dir: Path | None, download: bool, view: View) -> DatasetPair:
    size = view.image_size
    if name == "digits":
        return _built_in(name, builtin_sets.load_digits_set(size), 10, view)
    if name.split(":")[0] == "synthetic":
        classes = parse_synthetic(name)[1]
        return _built_in(name, builtin_sets.load_synthetic(name, size), classes, view)
    if name in VISION_SETS:
        splits = builtin_sets.load_vision_set(name, data_dir, download, size)
        return _built_in(name, splits, VISION_SETS[name].sizes.classes, view)
    if ":" in name:
        return _load_users(name, data_dir, download, view)
    if name == "imagenet":
        raise UserError(
            "--dataset imagenet requires --compute timed, because only the sizes of its images "
            "are known. To train, use --dataset imagefolder and --data-dir FOLDER."
        )
    raise UserError(
        f"--dataset: unknown data set {name!r}; {did_you_mean(name, NAMES)}known are "
        f"{', '.join(NAMES)}, and package.module:function"
    )


def _built_in(name: str, splits: builtin_sets.Splits, num_classes: int, view: View) -> DatasetPair:
    return _pair(name, (with_augmentation(each, view.augment) for each in splits), num_classes)


def _pair(name: str, splits: Iterable[Any], num_classes: int) -> DatasetPair:
    train, test = splits
    first = train[0][0]
    is_image = isinstance(first, Tensor) and first.dim() == 3
    channels, height = first.shape[:2] if is_image else (0, 0)
    return DatasetPair(train, test, num_classes, channels, height, name)


@lru_cache(maxsize=4)
def _load_imagefolder(
    data_dir: Path | None,
    view: View,
    cache: str,
    skip: bool,
    faults: tuple[Fault, ...] | None,
) -> DatasetPair:
    listings, classes = imagefolder.list_splits(data_dir)
    size = imagefolder.common_small_size(listings, skip)
    recipe = for_folder(size, view.image_size, view.augment)
    skipped = SkippedImages() if skip else None
    splits = []
    for split, listing in enumerate(listings):
        if skipped is not None:
            known = _known_faults(split, listing, size, cache, faults)
            skipped.known += [(str(listing.path(i)), why) for i, why in known.items()]
            listing = imagefolder.mended(listing, known, replaces=split == 0)
        splits.append(imagefolder.load_split(listing, recipe, size, cache, skipped))
    return _pair("imagefolder", splits, len(classes))


def _known_faults(
    split: int,
    listing: SplitListing,
    size: tuple[int, int] | None,
    cache: str,
    faults: tuple[Fault, ...] | None,
) -> dict[int, str]:
    """Return the known unreadable images of a split; none if it is decoded as needed."""
    if faults is not None:
        return {each.place: each.why for each in faults if each.split == split}
    return imagefolder.unreadable(listing) if imagefolder.is_held(listing, size, cache) else {}


@lru_cache(maxsize=4)
def _load_shards(data_dir: Path | None, view: View, skip: bool, shuffle_buffer: int) -> DatasetPair:
    skipped = SkippedImages() if skip else None
    recipe = for_folder(None, view.image_size, view.augment)
    train, test = (
        ShardImages(shards, indexed(shards), recipe, skipped, shuffle_buffer)
        for shards in find_shards(data_dir)
    )
    classes = int(train.targets.max()) + 1
    test.check_classes(classes)
    return _pair("shards", (train, test), classes)


def _load_users(name: str, data_dir: Path | None, download: bool, view: View) -> DatasetPair:
    function = import_function("--dataset", name)
    parameters = inspect.signature(function).parameters
    for option, value in view._asdict().items():
        if value not in (None, "auto") and option not in parameters:
            flag = f"--{kebab(option)}"
            raise UserError(
                f"{flag} requires a data set function with a parameter {option}; {name} has "
                f"none. Add the parameter, or leave {flag} out."
            )
    arguments = {"data_dir": data_dir, "download": download, **view._asdict()}
    result = call_with_accepted("--dataset", name, function, arguments)
    splits = (result.train, result.test) if isinstance(result, DatasetPair) else result
    if not isinstance(splits, tuple) or len(splits) != 2 or not all(map(_is_map_style, splits)):
        raise UserError(
            f"--dataset {name}: expected {function.__name__} to return a DatasetPair or (train, "
            f"test), two map-style data sets, got {type(result).__name__}; return one of these"
        )
    for kind, split in zip(("training", "test"), splits, strict=True):
        if not len(split):
            raise UserError(
                f"--dataset {name}: expected at least one sample in the {kind} set, got none; "
                "check the data"
            )
    if isinstance(result, DatasetPair):
        return result
    classes = known_classes(splits[0])
    if classes is None:
        raise UserError(
            f"--dataset {name}: the number of classes is unknown, because the training set has "
            "neither classes nor targets. Return a DatasetPair, which states it."
        )
    return _pair(name, splits, classes)


def _is_map_style(dataset: Any) -> bool:
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")


def known_classes(dataset: Any) -> int | None:
    """Return the number of classes by the dataset's classes, labels or second tensor, or None."""
    if hasattr(dataset, "classes"):
        return len(dataset.classes)
    if hasattr(dataset, "targets"):
        return int(torch.as_tensor(dataset.targets).max()) + 1
    if isinstance(dataset, torch.utils.data.TensorDataset) and len(dataset.tensors) > 1:
        return int(dataset.tensors[1].max()) + 1
    return None


def describe_set(
    name: str,
    data_dir: Path | None,
    download: bool,
    image_size: int | None = None,
    corrupt_images: str = "stop",
) -> Description:
    """Return the sizes of the dataset ``name``, which is read only if they are unknown.

    Raises:
        UserError: the errors of :func:`load_dataset`.
    """
    if name.split(":")[0] == "synthetic":
        (channels, height, _), classes, count = parse_synthetic(name)
        known = Description(count, classes, channels, height)
    elif name in VISION_SETS or name == "imagenet":
        known = IMAGENET if name == "imagenet" else VISION_SETS[name].sizes
    else:
        data = load_dataset(
            name, data_dir, download, image_size, "off", corrupt_images=corrupt_images
        )
        return Description(len(data.train), data.num_classes, data.in_channels, data.image_size)
    return known if image_size is None else replace(known, size=image_size)
