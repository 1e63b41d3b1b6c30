"""The data sets known by name that are not folders of images."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from aladdin_mpi.data.augment import CIFAR10, Normalisation, SmallImages
from aladdin_mpi.data.host_cache import cache_dir, one_at_a_time
from aladdin_mpi.data.images import ImageArrays
from aladdin_mpi.data.sampler import SYNTHESIS, sample_keys
from aladdin_mpi.errors import UserError
from aladdin_mpi.process import extras

MOST_KEPT = 2**31
"""Bytes of a set whose images are kept once they are drawn; those of larger sets are drawn anew."""


class DrawnImages:
    """Images, uint8 (N, C, H, W), that are drawn when they are taken by their numbers.

    A fixed pattern for each class, plus noise, so that they can be learned.

    Args:
        shape: (C, H, W).
        classes: image i is of class i modulo ``classes``.
        count: N.
        split: 0 to train, 1 to test.
    """

    dtype = torch.uint8

    def __init__(self, shape: tuple[int, int, int], classes: int, count: int, split: int) -> None:
        self.shape = torch.Size((count, *shape))
        self._classes = classes
        self._split = split
        # Coarse: at full size those of 1,000 classes of 224 x 224 pixels would be 600 MB.
        self._patterns = torch.randn(
            classes, shape[0], 4, 4, generator=torch.Generator().manual_seed(0)
        )
        keeps = self.shape.numel() <= MOST_KEPT
        self._kept = torch.empty(self.shape, dtype=self.dtype) if keeps else None
        self._is_drawn = np.zeros(count, dtype=bool)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, chosen: Tensor | slice | int) -> Tensor:
        """One image, or several as a tensor of their own."""
        if isinstance(chosen, int):
            return self[torch.tensor([chosen])][0]
        if isinstance(chosen, slice):
            numbers = np.arange(*chosen.indices(len(self)))
        else:
            numbers = chosen.numpy()
        if self._kept is None:
            return self._draw(numbers)
        missing = np.unique(numbers[~self._is_drawn[numbers]])
        if missing.size:
            self._kept[torch.from_numpy(missing)] = self._draw(missing)
            self._is_drawn[missing] = True  # last: another thread may ask for the same ones
        return self._kept[torch.from_numpy(numbers)]

    def _draw(self, numbers: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
        drawn = torch.empty(len(numbers), *self.shape[1:], dtype=self.dtype)
        generator = torch.Generator()
        keys = sample_keys(0, SYNTHESIS, self._split, numbers).tolist()
        for place, (number, key) in enumerate(zip(numbers.tolist(), keys, strict=True)):
            noise = torch.randn(tuple(self.shape[1:]), generator=generator.manual_seed(key))
            drawn[place] = noise.mul_(40).add_(self._pattern(number)).clamp_(0, 255)
        return drawn

    def _pattern(self, number: int) -> Tensor:
        place = number % self._classes
        size = tuple(self.shape[2:])
        coarse = self._patterns[place : place + 1]
        return F.interpolate(coarse, size, mode="bilinear")[0].mul_(40).add_(128)


def load_synthetic(name: str, image_size: int | None) -> tuple[ImageArrays, ImageArrays]:
    """Return a made-up set that can be learned.

    Args:
        name: ``synthetic`` (3x32x32 pixels, 10 classes, 10,000 images to train and a
            fifth as many to test) or ``synthetic:CxHxW:CLASSES:COUNT``.
        image_size: side to scale to, or None.
    """
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
        UserError: if ``name`` is not as described.
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


Splits = tuple[ImageArrays, ImageArrays]


DIGITS = Path(__file__).with_name("digits.npz")


def read_digits() -> dict[str, Tensor]:
    """The digits that come with this package.

    The test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, UCI
    Machine Learning Repository, https://doi.org/10.24432/C50P49, CC BY 4.0). Read without
    scikit-learn, which has them too: its import would double the time in which a rank starts.

    Returns:
        ``pixels``, uint8 of (1797, 8, 8) from 0 to 16; ``labels``, uint8; and the positions,
        int64, of those to ``train`` and to ``test`` with.
    """
    with np.load(DIGITS) as arrays:
        found = {name: torch.from_numpy(arrays[name]) for name in ("pixels", "labels")}
        places = {name: arrays[name].astype(np.int64) for name in ("train", "test")}
    return found | {name: torch.from_numpy(array) for name, array in places.items()}


def load_digits_set(image_size: int | None) -> Splits:
    """Return 1,797 handwritten digits of 8x8 pixels: 1,437 to train, 360 to test.

    The split is stratified and fixed.
    """
    digits = read_digits()
    images, targets = digits["pixels"].unsqueeze(1), digits["labels"].long()
    train, test = digits["train"], digits["test"]
    recipe = SmallImages(Normalisation((0.3053,), (0.3760,), maximum=16), image_size=image_size)
    return (
        ImageArrays(images[train], targets[train], recipe),
        ImageArrays(images[test], targets[test], recipe),
    )


@dataclass(frozen=True)
class VisionSet:
    """A data set that torchvision can read and download.

    ``class_name`` is torchvision's, ``folder`` what lies in the data folder, ``source``
    where to get it by hand.
    """

    class_name: str
    folder: str
    source: str
    num_classes: int
    recipe: SmallImages


VISION_SETS = {
    "mnist": VisionSet(
        "MNIST",
        "MNIST/raw",
        "http://yann.lecun.com/exdb/mnist",
        10,
        SmallImages(Normalisation((0.1307,), (0.3081,))),
    ),
    "fashion-mnist": VisionSet(
        "FashionMNIST",
        "FashionMNIST/raw",
        "https://github.com/zalandoresearch/fashion-mnist",
        10,
        SmallImages(Normalisation((0.2860,), (0.3530,)), pad=2, flip=True),
    ),
    "cifar10": VisionSet(
        "CIFAR10",
        "cifar-10-batches-py",
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        10,
        SmallImages(CIFAR10, pad=4, flip=True),
    ),
    "cifar100": VisionSet(
        "CIFAR100",
        "cifar-100-python",
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        100,
        SmallImages(
            Normalisation((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)), pad=4, flip=True
        ),
    ),
}


def load_vision_set(
    name: str, data_dir: Path | None, download: bool, image_size: int | None
) -> Splits:
    """Return one of :data:`VISION_SETS` from ``data_dir``, by default below the cache folder.

    Raises:
        UserError: if it is not there and ``download`` is not set, or the download fails, or
            torchvision is not installed.
    """
    extras.need("torchvision", f"--dataset {name}")
    known = VISION_SETS[name]
    root = data_dir or cache_dir() / "data"
    recipe = replace(known.recipe, image_size=image_size)
    if download:
        _download(known, root)
    elif not _is_complete(known, root):
        given = f"--data-dir {root}" if data_dir else f"--data-dir was not given, so {root}"
        raise UserError(
            f"--dataset {name}: not found, or damaged; {given} was searched for {known.folder}/. "
            "Add --download (on a node with internet access), or unpack it there from "
            f"{known.source}"
        )
    return _vision_split(known, root, True, recipe), _vision_split(known, root, False, recipe)


def _open(known: VisionSet, root: Path, train: bool, download: bool = False) -> Any:
    import torchvision

    return getattr(torchvision.datasets, known.class_name)(root, train, download=download)


def _is_complete(known: VisionSet, root: Path) -> bool:
    try:
        _open(known, root, train=False)
    except RuntimeError:  # torchvision's word for "not found or corrupted"
        return False
    return True


def _download(known: VisionSet, root: Path) -> None:
    """Download what is missing; the other ranks of the host wait here, and then find it."""
    try:
        with one_at_a_time(root / known.class_name):
            for train in (True, False):
                _open(known, root, train, download=True)
    except (OSError, RuntimeError) as error:
        if _is_complete(known, root):  # in a folder that cannot be written
            return
        raise UserError(
            f"--download: cannot download {known.class_name} to {root} ({error}); download it on a "
            f"node with internet access, or unpack it there from {known.source}"
        ) from error


def _vision_split(known: VisionSet, root: Path, train: bool, recipe: SmallImages) -> ImageArrays:
    return ImageArrays(*_arrays(_open(known, root, train)), recipe)


def _arrays(source: Any) -> tuple[Tensor, Tensor]:
    """Return torchvision's images as uint8 (N, C, H, W), and the labels."""
    images = torch.as_tensor(source.data)
    labels = torch.as_tensor(source.targets, dtype=torch.int64)
    images = images.permute(0, 3, 1, 2) if images.dim() == 4 else images[:, None]
    return images.contiguous(), labels
