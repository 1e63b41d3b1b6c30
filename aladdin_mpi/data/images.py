"""Data sets of images: in memory, or decoded from files as they are needed."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from aladdin_mpi.data.augment import LargeImages, SmallImages
from aladdin_mpi.data.sampler import AUGMENTATION, sample_keys
from aladdin_mpi.errors import UserError

Skip = tuple[str, str]
"""The path of an image, and why it cannot be read."""


class SkippedImages:
    """Those that one process has noticed in a data set; any of its threads may.

    Args:
        known: those noticed when the data set was made.
    """

    def __init__(self, known: Iterable[Skip] = ()) -> None:
        self.known = list(known)
        self._new: deque[Skip] = deque()

    def add(self, path: str, why: str) -> None:
        """Note one, each time that it is met: rank 0 counts it once."""
        self._new.append((path, why))

    def take(self) -> list[Skip]:
        """Those noted since the last call."""
        taken = []
        while self._new:
            taken.append(self._new.popleft())
        return taken


def skips_of(dataset: object) -> SkippedImages | None:
    """Where ``dataset`` notes what it skips, if it does."""
    found = getattr(dataset, "skipped", None)
    return found if isinstance(found, SkippedImages) else None


Int64Array = npt.NDArray[np.int64]

MOST_IN_A_ROW = 100
"""Images that cannot be read, one behind the other, before the folder is taken to be lost."""
OUT_OF_RESOURCES = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE})
"""Errors that say nothing about the file."""


class CorruptImageError(UserError):
    """A file is not a readable image.

    Attributes:
        path: of the file.
        why: what its decoder or the file system says.
    """

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            f"{path}: not a readable image ({why}); replace or remove it, or add "
            "--corrupt-images skip"
        )
        self.path = str(path)
        self.why = why


class Pixels(Protocol):
    """Images of one size, uint8 (N, C, H, W), such as a tensor."""

    @property
    def shape(self) -> torch.Size:
        """(N, C, H, W)."""
        ...

    def __getitem__(self, chosen: Any) -> Tensor:
        """One by its number, or several by a slice or a tensor of numbers."""
        ...


class ImageArrays(Dataset[tuple[Tensor, int]]):
    """Images of one size, as uint8; batches are made without a loop over samples.

    Indexing gives the evaluation view: a float32 tensor (C, H, W) and a label.

    Args:
        images: uint8 (N, C, H, W), in memory or made when they are asked for.
        labels: int64 (N,).
        recipe: normalisation, augmentation and output size.
        skipped: those that have been skipped, if that was asked for.
    """

    def __init__(
        self,
        images: Pixels,
        labels: Tensor,
        recipe: SmallImages | LargeImages,
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
        """Return a sample as :meth:`training_batch` has it, augmented by its key."""
        keys = np.array([key], dtype=np.uint64)
        return self.recipe.training(self.images[index][None], keys)[0], int(self.targets[index])

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

    With ``skipped`` the next image that can be read, behind the last one the first, stands in
    for one that cannot, with its own label. So a sample is the same wherever and whenever it
    is asked for.

    Args:
        root: folder that holds them.
        names: path of each file below ``root``.
        labels: class of each file.
        recipe: what to do with a decoded image.
        size: (width, height) that every image must have; None for any.
        skipped: where to note images that cannot be read; None: they are errors.
    """

    def __init__(
        self,
        root: Path,
        names: Sequence[str],
        labels: Sequence[int],
        recipe: SmallImages | LargeImages,
        size: tuple[int, int] | None = None,
        skipped: SkippedImages | None = None,
    ) -> None:
        self.root = root
        # One array, and not a million strings: loader processes that are forked would
        # copy the strings' pages as they count references.
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
        """Return the training view of a sample; ``key`` decides all random choices."""
        image, label = self._decoded(index)
        return self.recipe.training_image(image, key), label

    def readable(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """Return the evaluation views of those that can be read, with nothing in for others."""
        found = ((self._tried(index), index) for index in indices)
        return [
            (self.recipe.evaluation_image(image), int(self.targets[index]))
            for image, index in found
            if image is not None
        ]

    def _decoded(self, index: int) -> tuple[Image.Image, int]:
        """An image and its label, or those of the one that stands in for it."""
        tried = min(len(self), MOST_IN_A_ROW)
        for step in range(tried):
            place = (index + step) % len(self)
            image = self._tried(place)
            if image is not None:
                return image, int(self.targets[place])
        raise UserError(
            f"--corrupt-images skip: the last {tried} images cannot be read, the first of them "
            f"{self._path(index)}; look at {self.root}"
        )

    def _tried(self, index: int) -> Image.Image | None:
        """None where it cannot be read, and that is no error."""
        try:
            return self._decode(index)
        except CorruptImageError as error:
            if self.skipped is None:
                raise
            self.skipped.add(error.path, error.why)
            return None

    def _decode(self, index: int) -> Image.Image:
        return decode(self._path(index), self.size)

    def _path(self, index: int) -> Path:
        return self.root / os.fsdecode(self._names[index])


def decode(
    path: Path, size: tuple[int, int] | None = None, data: BinaryIO | None = None
) -> Image.Image:
    """Read one image file as RGB.

    Args:
        path: of the file.
        size: (width, height) that it must have; None for any.
        data: its content; None: it is read.

    Raises:
        CorruptImageError: it cannot be read.
        UserError: it has another (width, height) than ``size``.
    """
    try:
        with Image.open(path if data is None else data) as file:
            image = file.convert("RGB")
    except MemoryError:
        raise
    except Exception as error:  # of a damaged file decoders raise whatever they come by
        if getattr(error, "errno", None) in OUT_OF_RESOURCES:
            raise UserError(
                f"{path}: cannot be opened ({error}); raise the limits of the process (ulimit -n), "
                "or use fewer --loader-workers"
            ) from error
        why = str(error).replace(f" {str(path)!r}", "")  # which the message names already
        raise CorruptImageError(path, why or repr(error)) from error
    if size is not None and image.size != size:
        raise UserError(
            f"{path}: is {image.width}x{image.height} pixels, but the first images of this set "
            f"are {size[0]}x{size[1]}; a set of small images must have one size: resize it, or "
            "add --augment imagenet --cache off, which takes images of any size"
        )
    return image
