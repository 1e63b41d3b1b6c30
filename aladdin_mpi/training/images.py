"""Data sets of images: in memory, or decoded from files as they are needed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from aladdin_mpi.errors import UserError
from aladdin_mpi.training.augment import LargeImages, SmallImages
from aladdin_mpi.training.randomness import AUGMENTATION, sample_keys

Int64Array = npt.NDArray[np.int64]


class ImageArrays(Dataset[tuple[Tensor, int]]):
    """Images of one size, held as uint8; batches are made without a loop over samples.

    Indexing gives the evaluation view: a float32 tensor (C, H, W) and a label.

    Args:
        images: uint8 (N, C, H, W).
        labels: int64 (N,).
        recipe: normalisation, augmentation and output size.
    """

    def __init__(self, images: Tensor, labels: Tensor, recipe: SmallImages) -> None:
        self.images = images
        self.targets = labels
        self.recipe = recipe

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.recipe.evaluation(self.images[index][None])[0], int(self.targets[index])

    def evaluation_batch(self, indices: Int64Array | slice) -> tuple[Tensor, Tensor]:
        """Return the samples without augmentation: float32 (n, C, H, W), int64 (n,)."""
        chosen = indices if isinstance(indices, slice) else torch.from_numpy(indices)
        return self.recipe.evaluation(self.images[chosen]), self.targets[chosen]

    def training_batch(
        self, indices: Int64Array, epochs: Int64Array, seed: int
    ) -> tuple[Tensor, Tensor]:
        """Return the samples as augmented in their ``epochs``; shapes as in evaluation."""
        chosen = torch.from_numpy(indices)
        keys = sample_keys(seed, AUGMENTATION, epochs, indices)
        return self.recipe.training(self.images[chosen], keys), self.targets[chosen]


class ImageFiles(Dataset[tuple[Tensor, int]]):
    """Images that are decoded from their files each time.

    Indexing gives the evaluation view: a float32 tensor (3, H, W) and a label.

    Args:
        root: folder that holds them.
        names: path of each file below ``root``.
        labels: class of each file.
        recipe: what to do with a decoded image.
        size: (width, height) that every image must have; None for any.
    """

    def __init__(
        self,
        root: Path,
        names: Sequence[str],
        labels: Sequence[int],
        recipe: SmallImages | LargeImages,
        size: tuple[int, int] | None = None,
    ) -> None:
        self.root = root
        # One array, and not a million strings: loader processes that are forked would
        # copy the strings' pages as they count references.
        self._names = np.array([os.fsencode(name) for name in names])
        self.targets = torch.tensor(labels, dtype=torch.int64)
        self.recipe = recipe
        self.size = size

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.recipe.evaluation_image(self._decoded(index)), int(self.targets[index])

    def augmented(self, index: int, key: int) -> tuple[Tensor, int]:
        """Return the training view of a sample; ``key`` decides all random choices."""
        return self.recipe.training_image(self._decoded(index), key), int(self.targets[index])

    def _decoded(self, index: int) -> Image.Image:
        return decode(self.root / os.fsdecode(self._names[index]), self.size)


def decode(path: Path, size: tuple[int, int] | None = None) -> Image.Image:
    """Read one image file as RGB.

    Raises:
        UserError: if it cannot be read, or has another (width, height) than ``size``.
    """
    try:
        with Image.open(path) as file:
            image = file.convert("RGB")
    except (OSError, SyntaxError) as error:
        raise UserError(f"{path}: not a readable image ({error}); replace or remove it") from error
    if size is not None and image.size != size:
        raise UserError(
            f"{path}: is {image.width}x{image.height} pixels, but the first images of this set "
            f"are {size[0]}x{size[1]}; a set of small images must have one size: resize it"
        )
    return image
