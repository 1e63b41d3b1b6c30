"""Which recipe the images of a data set get: what ``--augment`` and ``--image-size`` say."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from torch import Tensor

from aladdin_mpi.data.augment import CIFAR10, LargeImages, SmallImages
from aladdin_mpi.data.images import ImageArrays
from aladdin_mpi.data.policies import CLASSES, Policy
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.general import Augment

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
