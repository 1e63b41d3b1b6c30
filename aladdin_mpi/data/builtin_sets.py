"""The built-in datasets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aladdin_mpi.data.augment import CIFAR10, Normalisation, SmallImages
from aladdin_mpi.data.host_cache import cache_dir, one_at_a_time
from aladdin_mpi.data.images import DrawnImages, ImageArrays
from aladdin_mpi.errors import UserError
from aladdin_mpi.process import extras

Splits = tuple[ImageArrays, ImageArrays]


def load_synthetic(name: str, image_size: int | None) -> Splits:
    """Return a learnable synthetic dataset; the test part is a fifth of the training part."""
    shape, classes, count = parse_synthetic(name)
    recipe = SmallImages(Normalisation((0.5,) * shape[0], (0.25,) * shape[0]), 0, False, image_size)
    train, test = (
        ImageArrays(
            DrawnImages(shape, classes, number, split), torch.arange(number) % classes, recipe
        )
        for split, number in enumerate((count, max(count // 5, classes)))
    )
    return train, test


def parse_synthetic(name: str) -> tuple[tuple[int, int, int], int, int]:
    """Return (C, H, W), the number of classes and of training images.

    Raises:
        UserError: ``name`` is neither ``synthetic`` nor ``synthetic:CxHxW:CLASSES:COUNT``.
    """
    if name == "synthetic":
        return (3, 32, 32), 10, 10_000
    try:
        _, size, classes, count = name.split(":")
        channels, height, width = (int(part) for part in size.split("x"))
        numbers = (channels, height, width, int(classes), int(count))
    except ValueError:
        numbers = (0,) * 5
    if min(numbers) < 1 or numbers[4] < numbers[3]:
        raise UserError(
            f"--dataset {name}: expected synthetic:CxHxW:CLASSES:COUNT with COUNT >= CLASSES, "
            "such as synthetic:3x32x32:10:10000"
        )
    return numbers[:3], numbers[3], numbers[4]


DIGITS = Path(__file__).with_name("digits.npz")


def read_digits() -> dict[str, Tensor]:
    """Return the digits included in this package.

    They are the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C.
    Kaynak, UCI Machine Learning Repository, https://doi.org/10.24432/C50P49, CC BY 4.0).
    scikit-learn has them too, but importing it would double the start-up time of a rank.

    Returns:
        ``pixels``, uint8 (1797, 8, 8) from 0 to 16; ``labels``, uint8; and the indices, int64, of
        the ``train`` and the ``test`` part.
    """
    kinds = {"pixels": np.uint8, "labels": np.uint8, "train": np.int64, "test": np.int64}
    with np.load(DIGITS) as arrays:
        return {name: torch.from_numpy(arrays[name].astype(kind)) for name, kind in kinds.items()}


def load_digits_set(image_size: int | None) -> Splits:
    """Return 1,797 handwritten digits (8x8): 1,437 for training, 360 for test, stratified."""
    digits = read_digits()
    images, targets = digits["pixels"].unsqueeze(1), digits["labels"].long()
    recipe = SmallImages(Normalisation((0.3053,), (0.3760,), maximum=16), image_size=image_size)
    train, test = (
        ImageArrays(images[digits[split]], targets[digits[split]], recipe)
        for split in ("train", "test")
    )
    return train, test


@dataclass(frozen=True)
class Description:
    """Sizes of an image dataset: training ``samples``, and the height of images as ``size``."""

    samples: int
    classes: int
    channels: int
    size: int


@dataclass(frozen=True)
class VisionSet:
    """A dataset that torchvision can read and download.

    ``class_name`` is torchvision's, ``folder`` its name in the data folder, ``source`` the URL for
    a manual download.
    """

    class_name: str
    folder: str
    source: str
    sizes: Description
    recipe: SmallImages


CIFAR = "https://www.cs.toronto.edu/~kriz/cifar.html"
CIFAR100 = Normalisation((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
VISION_SETS = {
    "mnist": VisionSet(
        "MNIST",
        "MNIST/raw",
        "http://yann.lecun.com/exdb/mnist",
        Description(60_000, 10, 1, 28),
        SmallImages(Normalisation((0.1307,), (0.3081,))),
    ),
    "fashion-mnist": VisionSet(
        "FashionMNIST",
        "FashionMNIST/raw",
        "https://github.com/zalandoresearch/fashion-mnist",
        Description(60_000, 10, 1, 28),
        SmallImages(Normalisation((0.2860,), (0.3530,)), pad=2, flip=True),
    ),
    "cifar10": VisionSet(
        "CIFAR10",
        "cifar-10-batches-py",
        CIFAR,
        Description(50_000, 10, 3, 32),
        SmallImages(CIFAR10, pad=4, flip=True),
    ),
    "cifar100": VisionSet(
        "CIFAR100",
        "cifar-100-python",
        CIFAR,
        Description(50_000, 100, 3, 32),
        SmallImages(CIFAR100, pad=4, flip=True),
    ),
}


def load_vision_set(
    name: str, data_dir: Path | None, download: bool, image_size: int | None
) -> Splits:
    """Return one of :data:`VISION_SETS` from ``data_dir``, by default in the cache folder.

    Raises:
        UserError: the data are missing and ``download`` is not set, the download fails, or
            torchvision is not installed.
    """
    extras.need("torchvision", f"--dataset {name}")
    known = VISION_SETS[name]
    root = data_dir or cache_dir() / "data"
    if download:
        _download(known, root)
    elif not _is_complete(known, root):
        given = f"--data-dir {root}" if data_dir else f"--data-dir was not given, so {root}"
        raise UserError(
            f"--dataset {name}: not found or damaged; {given} was searched for {known.folder}/. "
            "Add --download (on a node with internet access), or unpack it there from "
            f"{known.source}"
        )
    recipe = replace(known.recipe, image_size=image_size)
    train, test = (
        ImageArrays(*_arrays(_open(known, root, split)), recipe) for split in (True, False)
    )
    return train, test


def _open(known: VisionSet, root: Path, train: bool, download: bool = False) -> Any:
    import torchvision

    return getattr(torchvision.datasets, known.class_name)(root, train, download=download)


def _is_complete(known: VisionSet, root: Path) -> bool:
    try:
        _open(known, root, train=False)
    except RuntimeError:  # torchvision: "not found or corrupted"
        return False
    return True


def _download(known: VisionSet, root: Path) -> None:
    """Download missing data once per host; the host's other ranks wait for it."""
    try:
        with one_at_a_time(root / known.class_name):
            for train in (True, False):
                _open(known, root, train, download=True)
    except (OSError, RuntimeError) as error:
        if not _is_complete(known, root):  # the data may be complete in a read-only folder
            raise UserError(
                f"--download: cannot download {known.class_name} to {root} ({error}). Download "
                f"it on a node with internet access, or unpack it there from {known.source}"
            ) from error


def _arrays(source: Any) -> tuple[Tensor, Tensor]:
    """Return torchvision's images as uint8 (N, C, H, W), and the labels."""
    images = torch.as_tensor(source.data)
    labels = torch.as_tensor(source.targets, dtype=torch.int64)
    images = images.permute(0, 3, 1, 2) if images.dim() == 4 else images[:, None]
    return images.contiguous(), labels
