"""A made-up set of images, of any size, each of which is drawn when it is asked for."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from aladdin_mpi.data.augment import Normalisation, SmallImages
from aladdin_mpi.data.images import ImageArrays
from aladdin_mpi.data.randomness import SYNTHESIS, sample_keys
from aladdin_mpi.errors import UserError

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
