"""Image datasets: in memory, synthetic, or decoded from files as needed."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from aladdin_mpi.data.augment import Recipe
from aladdin_mpi.data.sampler import AUGMENTATION, SYNTHESIS, Int64Array, sample_keys
from aladdin_mpi.errors import UserError

Skip = tuple[str, str]
"""The path of an unreadable image, and the reason."""


class SkippedImages:
    """The unreadable images of a dataset that a process has encountered, in any of its threads.

    ``known`` are those found when the dataset was created.
    """

    def __init__(self) -> None:
        self.known: list[Skip] = []
        self._new: deque[Skip] = deque()

    def add(self, path: str, why: str) -> None:
        """Record an image whenever it is encountered; rank 0 counts it once."""
        self._new.append((path, why))

    def take(self) -> list[Skip]:
        """Return the images recorded since the last call."""
        return [self._new.popleft() for _ in range(len(self._new))]


def skips_of(dataset: object) -> SkippedImages | None:
    """Return the record of images that ``dataset`` skips, if it has one."""
    skipped = getattr(dataset, "skipped", None)
    return skipped if isinstance(skipped, SkippedImages) else None


MOST_IN_A_ROW = 100
"""Number of successive unreadable images after which the folder counts as unreadable."""
OUT_OF_RESOURCES = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE})
"""Errors of the process, not of the file."""


class CorruptImageError(UserError):
    """A file is not a readable image; ``why`` is the decoder's or the file system's message."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            f"{path}: not a readable image ({why}); replace or remove it, or add "
            "--corrupt-images skip"
        )
        self.why = why


MOST_KEPT = 2**31
"""Most bytes of a synthetic dataset that is held in memory; larger ones are drawn each time."""


class DrawnImages:
    """Synthetic images, uint8 (N, C, H, W), that are drawn when they are indexed.

    Each is the fixed pattern of its class plus noise, so that the dataset is learnable.

    Args:
        shape: (C, H, W).
        classes: image i is of class i modulo ``classes``.
        count: N.
        split: 0 for training, 1 for test.
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, count: int, split: int) -> None:
        self.shape = torch.Size((count, *shape))
        self._classes = classes
        self._split = split
        # Coarse, as 1,000 patterns of 224 x 224 pixels would take 600 MB.
        generator = torch.Generator().manual_seed(0)
        self._patterns = torch.randn(classes, shape[0], 4, 4, generator=generator)
        keeps = self.shape.numel() <= MOST_KEPT
        self._kept = torch.empty(self.shape, dtype=torch.uint8) if keeps else None
        self._is_drawn = np.zeros(count, dtype=bool)

    def __getitem__(self, chosen: Tensor | slice | int) -> Tensor:
        """Return one image, or several as a new tensor."""
        if isinstance(chosen, int):
            return self[torch.tensor([chosen])][0]
        if isinstance(chosen, slice):
            numbers = np.arange(*chosen.indices(self.shape[0]))
        else:
            numbers = chosen.numpy()
        if self._kept is None:
            return self._draw(numbers)
        missing = np.unique(numbers[~self._is_drawn[numbers]])
        if missing.size:
            self._kept[torch.from_numpy(missing)] = self._draw(missing)
            self._is_drawn[missing] = True  # last, as another thread may index the same images
        return self._kept[torch.from_numpy(numbers)]

    def _draw(self, numbers: Int64Array) -> Tensor:
        drawn = torch.empty(len(numbers), *self.shape[1:], dtype=torch.uint8)
        generator, size = torch.Generator(), tuple(self.shape[2:])
        keys = sample_keys(0, SYNTHESIS, self._split, numbers).tolist()
        for place, (number, key) in enumerate(zip(numbers.tolist(), keys, strict=True)):
            coarse = self._patterns[number % self._classes][None]
            pattern = F.interpolate(coarse, size, mode="bilinear")[0].mul_(40).add_(128)
            noise = torch.randn(tuple(self.shape[1:]), generator=generator.manual_seed(key))
            drawn[place] = noise.mul_(40).add_(pattern).clamp_(0, 255)
        return drawn


class ImageArrays(Dataset[tuple[Tensor, int]]):
    """Images of one size, uint8 (N, C, H, W); batches are made without a loop over samples.

    Indexing returns the evaluation view: a float32 tensor (C, H, W) and a label. ``labels`` are
    int64 (N,). ``skipped`` records unreadable images that were left out, if requested.
    """

    def __init__(
        self,
        images: Tensor | DrawnImages,
        labels: Tensor,
        recipe: Recipe,
        skipped: SkippedImages | None = None,
    ) -> None:
        self.images = images
        self.targets = labels
        self.recipe = recipe
        self.skipped = skipped

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.recipe.evaluation(self.images[index][None])[0], int(self.targets[index])

    def augmented(self, index: int, key: int) -> tuple[Tensor, int]:
        """Return a sample augmented by its key, as in :meth:`training_batch`."""
        keys = np.array([key], dtype=np.uint64)
        return self.recipe.training(self.images[index][None], keys)[0], int(self.targets[index])

    def evaluation_batch(self, indices: Int64Array | slice) -> tuple[Tensor, Tensor]:
        """Return the samples without augmentation: float32 (n, C, H, W), int64 (n,)."""
        chosen = indices if isinstance(indices, slice) else torch.from_numpy(indices)
        return self.recipe.evaluation(self.images[chosen]), self.targets[chosen]

    def training_batch(
        self, indices: Int64Array, epochs: Int64Array, seed: int
    ) -> tuple[Tensor, Tensor]:
        """Return the samples augmented for their ``epochs``; shapes as in evaluation."""
        chosen = torch.from_numpy(indices)
        keys = sample_keys(seed, AUGMENTATION, epochs, indices)
        return self.recipe.training(self.images[chosen], keys), self.targets[chosen]


class ImageFiles(Dataset[tuple[Tensor, int]]):
    """Images decoded from files, ``names`` below ``root``, at each access.

    Indexing returns the evaluation view: a float32 tensor (3, H, W) and a label. ``size`` is the
    (width, height) that every image must have, if any.

    Unreadable images are errors, unless ``skipped`` records them. Then the next readable image
    (after the last one, the first) replaces each, with its own label. So a sample is the same on
    every rank and at every access.
    """

    def __init__(
        self,
        root: Path,
        names: Sequence[str],
        labels: Sequence[int],
        recipe: Recipe,
        size: tuple[int, int] | None = None,
        skipped: SkippedImages | None = None,
    ) -> None:
        self.root = root
        # One array instead of a million strings, whose pages forked loader processes would copy
        # through reference counting.
        self._names = np.array([os.fsencode(name) for name in names])
        self.targets = torch.tensor(labels, dtype=torch.int64)
        self.recipe = recipe
        self.size = size
        self.skipped = skipped

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self._decoded(index)
        return self.recipe.evaluation_image(image), label

    def augmented(self, index: int, key: int) -> tuple[Tensor, int]:
        """Return the training view of a sample; ``key`` determines all random choices."""
        image, label = self._decoded(index)
        return self.recipe.training_image(image, key), label

    def readable(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """Return the evaluation views of the readable images."""
        images = zip(map(self._tried, indices), indices, strict=True)
        return [
            (self.recipe.evaluation_image(image), int(self.targets[index]))
            for image, index in images
            if image is not None
        ]

    def _decoded(self, index: int) -> tuple[Image.Image, int]:
        """Return an image and its label, or those of its replacement."""
        tried = min(len(self), MOST_IN_A_ROW)
        for step in range(tried):
            place = (index + step) % len(self)
            image = self._tried(place)
            if image is not None:
                return image, int(self.targets[place])
        raise UserError(
            f"--corrupt-images skip: the last {tried} images cannot be read, the first of them "
            f"{self._path(index)}. Check {self.root}."
        )

    def _tried(self, index: int) -> Image.Image | None:
        """Return the image; None if it is unreadable and skipped."""
        try:
            return self._decode(index)
        except CorruptImageError as error:
            if self.skipped is None:
                raise
            self.skipped.add(str(self._path(index)), error.why)
            return None

    def _decode(self, index: int) -> Image.Image:
        return decode(self._path(index), self.size)

    def _path(self, index: int) -> Path:
        return self.root / os.fsdecode(self._names[index])


def decode(
    path: Path, size: tuple[int, int] | None = None, data: BinaryIO | None = None
) -> Image.Image:
    """Read an image file, or its content ``data``, as RGB.

    Raises:
        CorruptImageError: it cannot be read.
        UserError: its (width, height) is not ``size``, or the process cannot open files.
    """
    try:
        with Image.open(path if data is None else data) as file:
            image = file.convert("RGB")
    except MemoryError:
        raise
    except Exception as error:  # decoders of damaged files raise errors of any type
        if getattr(error, "errno", None) in OUT_OF_RESOURCES:
            raise UserError(
                f"{path}: cannot be opened ({error}). Raise the limits of the process (ulimit "
                "-n), or use fewer --loader-workers."
            ) from error
        why = str(error).replace(f" {str(path)!r}", "")  # the new message has the path already
        raise CorruptImageError(path, why or repr(error)) from error
    if size is not None and image.size != size:
        raise UserError(
            f"{path}: is {image.width}x{image.height} pixels, but the first images of this set "
            f"are {size[0]}x{size[1]}; a set of small images must have one size: resize it, or "
            "add --augment imagenet --cache off, which takes images of any size"
        )
    return image
