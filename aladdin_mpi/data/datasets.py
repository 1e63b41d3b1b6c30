"""Data sets by name: ``load_dataset`` and what it returns."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from aladdin_mpi.data import builtin_sets, imagefolder
from aladdin_mpi.data.augment import CIFAR10, CLASSES, LargeImages, Policy, SmallImages
from aladdin_mpi.data.builtin_sets import parse_synthetic
from aladdin_mpi.data.imagefolder import Fault, SplitListing
from aladdin_mpi.data.images import ImageArrays, SkippedImages
from aladdin_mpi.data.shards import ShardImages, find_shards, indexed
from aladdin_mpi.data.user_code import call_with_accepted, import_function
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.general import SHUFFLE_BUFFER, Augment
from aladdin_mpi.options.reader import kebab

CHOICES = get_args(Augment)
BY_IMAGE = frozenset({"imagenet", *CLASSES})
"""Those that work on decoded images one by one: grey or RGB, of pixels up to 255."""


def for_folder(
    size: tuple[int, int] | None, image_size: int | None, augment: str
) -> SmallImages | LargeImages:
    """Return CIFAR's recipe for small images of one ``size``, otherwise ImageNet's.

    Args:
        size: (width, height) in pixels; None: they differ, or are large.
        image_size: side in pixels to scale to, if any.
        augment: one of :data:`CHOICES`.
    """
    if size is None:
        return _large(image_size or 224, augment)
    recipe = SmallImages(CIFAR10, pad=size[1] // 8, flip=True, image_size=image_size)
    return _small(recipe, size[1], augment)


def with_augmentation(arrays: ImageArrays, augment: str) -> ImageArrays:
    """Return ``arrays``, which have their own recipe, with that for ``augment``.

    Raises:
        UserError: it does not take images of so many channels.
    """
    if augment == "auto":
        return arrays
    images, recipe = arrays.images, arrays.recipe
    assert isinstance(recipe, SmallImages)
    channels, height = images.shape[1:3]
    if augment in BY_IMAGE:
        if channels not in (1, 3):
            raise UserError(
                f"--augment {augment}: expected images of 1 or 3 channels, got {channels}; give "
                "auto, none or crop-flip"
            )
        maximum = recipe.normalisation.maximum
        if maximum != 255 and isinstance(images, Tensor):
            images = (images * (255 / maximum)).round().to(images.dtype)
            recipe = replace(recipe, normalisation=replace(recipe.normalisation, maximum=255.0))
    return ImageArrays(images, arrays.targets, _small(recipe, height, augment))


def _small(recipe: SmallImages, height: int, augment: str) -> SmallImages | LargeImages:
    if augment == "none":
        return replace(recipe, pad=0, flip=False)
    if augment == "crop-flip":
        return replace(recipe, pad=max(1, height // 8), flip=True)
    if augment == "imagenet":
        return LargeImages(recipe.normalisation, recipe.image_size or height)
    policy = Policy(augment, "CIFAR10") if augment in CLASSES else None
    return replace(recipe, policy=policy)


def _large(image_size: int, augment: str) -> LargeImages:
    if augment == "none":
        return LargeImages(image_size=image_size, crop="none")
    if augment == "crop-flip":
        return LargeImages(image_size=image_size, crop="shift")
    policy = Policy(augment, "IMAGENET") if augment in CLASSES else None
    return LargeImages(image_size=image_size, policy=policy)


NAMES = ("digits", *builtin_sets.VISION_SETS, "imagefolder", "shards", "synthetic")
CACHE_CHOICES = ("auto", "on", "off")
CORRUPT_CHOICES = ("stop", "skip")


class MapDataset(Protocol):
    """A map-style data set: ``dataset[i]`` is (input, label).

    A data set with random augmentation draws from the global generator of torch, Python
    or numpy, which are seeded for each (run seed, epoch, sample); or it offers
    ``augmented(index, key)``, the training view of a sample as decided by a 64-bit ``key``.
    """

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Return sample ``index``."""
        ...


@dataclass(frozen=True)
class DatasetPair:
    """Training and test data.

    ``image_size`` is the height in pixels. It and ``in_channels`` are 0 where the inputs
    are not images.
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
    """Return the data set called ``name``; the ranks of one process share it.

    Args:
        name: ``digits``, ``mnist``, ``fashion-mnist``, ``cifar10``, ``cifar100``,
            ``imagefolder``, ``shards``, ``synthetic``, ``synthetic:CxHxW:CLASSES:COUNT``, or
            ``package.module:function``. A function is given those of ``data_dir``,
            ``download``, ``image_size``, ``augment`` that it has parameters for, and returns
            a :class:`DatasetPair` or (train, test).
        data_dir: where the data lie; by default below the cache folder.
        download: whether to download what is missing.
        image_size: side in pixels to scale images to. None: as they are, or 224 for
            folders of large images.
        cache: for folders of small images: ``on`` decodes them once into memory and
            into the cache folder, ``off`` decodes as needed, ``auto`` is ``on`` for up to
            2 GiB decoded. Sets of large images are always decoded as needed.
        augment: one of :data:`.recipes.CHOICES`; ``auto`` is what is said below.
        corrupt_images: of ``imagefolder`` and ``shards``: ``stop`` raises an error at an image
            that cannot be read; ``skip`` notes it, puts the next one in its place in the
            training set, and leaves it out of :func:`.loading.test_batches`.
        faults: those that are known to be corrupt; None: nobody has looked.
        shuffle_buffer: of ``shards``: a sample is moved by less than this many places out of the
            order in which its shard has it; 1: by none.

    Small images (all of one size, at most 64 pixels) are cropped after padding by an
    eighth of their height and mirrored for training; larger ones get ImageNet's recipe.

    Raises:
        UserError: unknown name, missing or wrong data, wrong option.
    """
    if image_size is not None and image_size < 1:
        raise UserError(f"image_size: expected at least 1 pixel, got {image_size}")
    if shuffle_buffer < 1:
        raise UserError(
            f"--shuffle-buffer: expected at least 1 sample, got {shuffle_buffer}; give 1 to read "
            "each shard as it is"
        )
    for flag, value, choices in (
        ("--cache", cache, CACHE_CHOICES),
        ("--augment", augment, CHOICES),
        ("--corrupt-images", corrupt_images, CORRUPT_CHOICES),
    ):
        if value not in choices:
            raise UserError(f"{flag}: expected one of {', '.join(choices)}, got {value!r}")
    look = Look(image_size, augment)
    with _LOADING:
        if name == "imagefolder":
            return _load_imagefolder(data_dir, look, cache, corrupt_images == "skip", faults)
        if name == "shards":
            return _load_shards(data_dir, look, corrupt_images == "skip", shuffle_buffer)
        return _load(name, data_dir, download, look)


# A user's data function may load one of the built-in sets in its turn.
_LOADING = threading.RLock()


class Look(NamedTuple):
    """How images are given to the model: the options ``--image-size`` and ``--augment``."""

    image_size: int | None
    augment: str


@lru_cache(maxsize=4)
def _load(name: str, data_dir: Path | None, download: bool, look: Look) -> DatasetPair:
    if name == "digits":
        return _built_in(name, builtin_sets.load_digits_set(look.image_size), 10, look)
    if name.split(":")[0] == "synthetic":
        splits = builtin_sets.load_synthetic(name, look.image_size)
        return _built_in(name, splits, builtin_sets.parse_synthetic(name)[1], look)
    if name in builtin_sets.VISION_SETS:
        splits = builtin_sets.load_vision_set(name, data_dir, download, look.image_size)
        return _built_in(name, splits, builtin_sets.VISION_SETS[name].num_classes, look)
    if ":" in name:
        return _load_users(name, data_dir, download, look)
    if name == "imagenet":
        raise UserError(
            "--dataset imagenet: expected only with --compute timed, which needs its sizes alone, "
            "got --compute real; give --dataset imagefolder and --data-dir FOLDER"
        )
    close = get_close_matches(name, NAMES)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise UserError(
        f"--dataset: unknown data set {name!r}; {hint}known are {', '.join(NAMES)}, "
        "and package.module:function"
    )


def _load_users(name: str, data_dir: Path | None, download: bool, look: Look) -> DatasetPair:
    function = import_function("--dataset", name)
    parameters = inspect.signature(function).parameters
    for option, value in look._asdict().items():
        if value not in (None, "auto") and option not in parameters:
            flag = f"--{kebab(option)}"
            raise UserError(
                f"{flag}: expected a data set that heeds it, but {name} has no parameter {option}; "
                f"add that, or leave {flag} out"
            )
    arguments = {"data_dir": data_dir, "download": download, **look._asdict()}
    result = call_with_accepted("--dataset", name, function, arguments)
    return _checked(name, function, result)


@lru_cache(maxsize=4)
def _load_imagefolder(
    data_dir: Path | None,
    look: Look,
    cache: str,
    skip: bool,
    faults: tuple[Fault, ...] | None,
) -> DatasetPair:
    listings, classes = imagefolder.list_splits(data_dir)
    size = imagefolder.common_small_size(listings, skip)
    recipe = for_folder(size, look.image_size, look.augment)
    skipped = SkippedImages() if skip else None
    if skipped is not None:
        listings = [
            _mended(split, listing, size, cache, faults, skipped)
            for split, listing in enumerate(listings)
        ]
    splits = tuple(imagefolder.load_split(each, recipe, size, cache, skipped) for each in listings)
    return _pair("imagefolder", splits, len(classes))


@lru_cache(maxsize=4)
def _load_shards(data_dir: Path | None, look: Look, skip: bool, shuffle_buffer: int) -> DatasetPair:
    skipped = SkippedImages() if skip else None
    recipe = for_folder(None, look.image_size, look.augment)
    splits = tuple(
        ShardImages(shards, indexed(shards), recipe, skipped, shuffle_buffer)
        for shards in find_shards(data_dir)
    )
    classes = int(splits[0].targets.max()) + 1
    splits[1].check_classes(classes)
    return _pair("shards", splits, classes)


def _mended(
    split: int,
    listing: SplitListing,
    size: tuple[int, int] | None,
    cache: str,
    faults: tuple[Fault, ...] | None,
    skipped: SkippedImages,
) -> SplitListing:
    """One split with stand-ins for the images that cannot be read, or, to test with, without.

    Those of a set that is decoded as needed may not be known yet.
    """
    known: dict[int, str] = {}
    if faults is not None:
        known = {each.place: each.why for each in faults if each.split == split}
    elif imagefolder.is_held(listing, size, cache):
        known = imagefolder.unreadable(listing)
    skipped.known += [(str(listing.path(i)), why) for i, why in known.items()]
    mend = imagefolder.without if split else imagefolder.with_stand_ins
    return mend(listing, known)


def _built_in(name: str, splits: builtin_sets.Splits, num_classes: int, look: Look) -> DatasetPair:
    augmented = tuple(with_augmentation(each, look.augment) for each in splits)
    return _pair(name, augmented, num_classes)


def _pair(name: str, splits: tuple[Any, ...], num_classes: int) -> DatasetPair:
    train, test = splits
    channels, height = _image_shape(train)
    return DatasetPair(train, test, num_classes, channels, height, name)


def _image_shape(dataset: MapDataset) -> tuple[int, int]:
    """Return channels and height of the first sample; (0, 0) if it is no image."""
    first = dataset[0][0]
    is_image = isinstance(first, Tensor) and first.dim() == 3
    return (first.shape[0], first.shape[1]) if is_image else (0, 0)


def _checked(name: str, function: Callable[..., Any], result: Any) -> DatasetPair:
    """Return what a user's function gave as a pair.

    Raises:
        UserError: if it is something else.
    """
    if isinstance(result, DatasetPair):
        _check_not_empty(name, (result.train, result.test))
        return result
    is_pair = isinstance(result, tuple) and len(result) == 2
    if not is_pair or not all(
        hasattr(each, "__len__") and hasattr(each, "__getitem__") for each in result
    ):
        raise UserError(
            f"--dataset {name}: {function.__name__} must return a DatasetPair or (train, test), "
            f"two map-style data sets; it returned {type(result).__name__}"
        )
    _check_not_empty(name, result)
    return _pair(name, result, _count_classes(name, result[0]))


def _check_not_empty(name: str, splits: tuple[Any, ...]) -> None:
    for kind, split in zip(("training", "test"), splits, strict=True):
        if not len(split):
            raise UserError(
                f"--dataset {name}: expected at least one sample in the {kind} set, got none; look "
                "at what it is made of"
            )


def known_classes(dataset: Any) -> int | None:
    """The number of classes, if the data set tells it; all of its labels may be looked at."""
    if hasattr(dataset, "classes"):
        return len(dataset.classes)
    if hasattr(dataset, "targets"):
        return int(torch.as_tensor(dataset.targets).max()) + 1
    if isinstance(dataset, torch.utils.data.TensorDataset) and len(dataset.tensors) > 1:
        return int(dataset.tensors[1].max()) + 1
    return None


def _count_classes(name: str, dataset: Any) -> int:
    classes = known_classes(dataset)
    if classes is not None:
        return classes
    raise UserError(
        f"--dataset {name}: cannot tell the number of classes: the training set has neither "
        "classes nor targets; return a DatasetPair, which states it"
    )


@dataclass(frozen=True)
class Description:
    """Of a training set of images.

    Args:
        samples: in an epoch.
        classes: outputs of a model.
        channels: of an image.
        size: its height in pixels.
    """

    samples: int
    classes: int
    channels: int
    size: int


KNOWN = {
    "mnist": Description(60_000, 10, 1, 28),
    "fashion-mnist": Description(60_000, 10, 1, 28),
    "cifar10": Description(50_000, 10, 3, 32),
    "cifar100": Description(50_000, 100, 3, 32),
    "imagenet": Description(1_281_167, 1000, 3, 224),
}


def describe_set(
    name: str,
    data_dir: Path | None,
    download: bool,
    image_size: int | None = None,
    corrupt_images: str = "stop",
) -> Description:
    """The sizes of the data set ``name``, which is read only if they are not known.

    Raises:
        UserError: as :func:`~aladdin_mpi.data.datasets.load_dataset`.
    """
    found = _known(name)
    if found is None:
        data = load_dataset(
            name, data_dir, download, image_size, "off", corrupt_images=corrupt_images
        )
        return Description(len(data.train), data.num_classes, data.in_channels, data.image_size)
    return found if image_size is None else replace(found, size=image_size)


def _known(name: str) -> Description | None:
    if name.split(":")[0] == "synthetic":
        shape, classes, count = parse_synthetic(name)
        return Description(count, classes, shape[0], shape[1])
    return KNOWN.get(name)
