"""Recipes that turn stored pixels into a network's inputs.

:class:`SmallImages` processes whole batches of images of one small size, :class:`LargeImages`
photographs of any size, one by one. Both have an evaluation view, and a training view whose random
choices are determined by a 64-bit key per sample. Both take a batch of stored images, or one
decoded image.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.overrides import TorchFunctionMode

from aladdin_mpi.data.sampler import UInt64Array, bounded
from aladdin_mpi.process import extras


@dataclass(frozen=True)
class Normalisation:
    """Each channel's mean and standard deviation, of pixels from 0 to ``maximum`` scaled to 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    maximum: float = 255.0

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return uint8 pixels (..., C, H, W) as float32 with about zero mean and unit variance."""
        mean = torch.tensor(self.mean).view(-1, 1, 1)
        std = torch.tensor(self.std).view(-1, 1, 1)
        return pixels.to(torch.float32).mul_(1 / (self.maximum * std)).sub_(mean / std)


IMAGENET = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CIFAR10 = Normalisation((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


def crop_and_flip(images: Tensor, keys: UInt64Array, pad: int, flip: bool) -> Tensor:
    """Shift each image by up to ``pad`` pixels over black; with ``flip``, mirror half of them.

    Images are uint8 (N, C, H, W); ``keys`` (N,) come from :func:`~.sampler.sample_keys`.
    """
    count, channels, height, width = images.shape
    padded = np.zeros((count, channels, height + 2 * pad, width + 2 * pad), dtype=np.uint8)
    padded[:, :, pad : pad + height, pad : pad + width] = images.numpy()
    result = np.empty((count, channels, height, width), dtype=np.uint8)
    tops = bounded(keys, 0, 2 * pad + 1).tolist()
    lefts = bounded(keys, 1, 2 * pad + 1).tolist()
    mirrored = bounded(keys, 2, 2).tolist() if flip else [0] * count
    # A loop over slices is faster than index tensors: it copies rows, not single pixels.
    for i, (top, left, mirror) in enumerate(zip(tops, lefts, mirrored, strict=True)):
        view = padded[i, :, top : top + height, left : left + width]
        result[i] = view[:, :, ::-1] if mirror else view
    return torch.from_numpy(result)


@dataclass(frozen=True)
class SmallImages:
    """Recipe for images that all have one small size (He et al. 2015, section 4.2).

    Training: a crop after padding by ``pad`` black pixels; with ``flip``, mirrored half of the
    time; then ``policy``. At the end, images are scaled to the side ``image_size``, if any.
    """

    normalisation: Normalisation
    pad: int = 0
    flip: bool = False
    image_size: int | None = None
    policy: Policy | None = None

    def evaluation(self, images: Tensor) -> Tensor:
        """Return uint8 (N, C, H, W) as normalised float32."""
        images, side = self.normalisation(images), self.image_size
        if side is None or tuple(images.shape[2:]) == (side, side):
            return images
        return F.interpolate(images, (side, side), mode="bilinear", antialias=True)

    def training(self, images: Tensor, keys: UInt64Array) -> Tensor:
        """Return uint8 (N, C, H, W) augmented by ``keys`` (N,) and normalised."""
        if self.pad or self.flip:
            images = crop_and_flip(images, keys, self.pad, self.flip)
        if self.policy is not None:
            pairs = zip(images, keys.tolist(), strict=True)
            changed = [to_tensor(self.policy(to_image(image), key)) for image, key in pairs]
            images = torch.stack(changed)
        return self.evaluation(images)

    def evaluation_image(self, image: Image.Image) -> Tensor:
        """Return one decoded image as (C, H, W)."""
        return self.evaluation(to_tensor(image)[None])[0]

    def training_image(self, image: Image.Image, key: int) -> Tensor:
        """Return one decoded image, augmented by ``key``, as (C, H, W)."""
        return self.training(to_tensor(image)[None], np.array([key], dtype=np.uint64))[0]


@dataclass(frozen=True)
class LargeImages:
    """The usual recipe for ImageNet.

    Training: a part of the image selected by ``crop``, mirrored half of the time; then ``policy``.
    ``zoom`` is a random part of 8 to 100 % of the area, scaled to ``image_size`` (Szegedy et al.
    2015). ``shift`` is a random square of ``image_size`` in the image scaled as for evaluation
    (Krizhevsky et al. 2012). ``none`` is the evaluation view. Evaluation: the shorter side is
    scaled to 256/224 of ``image_size``, then the central square is cut out.
    """

    normalisation: Normalisation = IMAGENET
    image_size: int = 224
    crop: Literal["zoom", "shift", "none"] = "zoom"
    policy: Policy | None = None

    def evaluation(self, images: Tensor) -> Tensor:
        """Return uint8 (N, C, H, W) as float32 (N, C, image_size, image_size)."""
        return torch.stack([self.evaluation_image(to_image(image)) for image in images])

    def training(self, images: Tensor, keys: UInt64Array) -> Tensor:
        """Return uint8 (N, C, H, W), augmented by ``keys`` (N,), as in evaluation."""
        pairs = zip(images, keys.tolist(), strict=True)
        return torch.stack([self.training_image(to_image(image), key) for image, key in pairs])

    def evaluation_image(self, image: Image.Image) -> Tensor:
        """Return one decoded image as (C, image_size, image_size)."""
        image = self._shrunk(image)
        left = (image.width - self.image_size) // 2
        top = (image.height - self.image_size) // 2
        return self.normalisation(to_tensor(self._square(image, left, top)))

    def training_image(self, image: Image.Image, key: int) -> Tensor:
        """Return one decoded image, augmented by ``key``, as (C, image_size, image_size)."""
        if self.crop == "none":
            return self.evaluation_image(image)
        draw, side = random.Random(key), self.image_size
        if self.crop == "zoom":
            box = random_box(*image.size, draw)
            image = image.resize((side, side), Image.Resampling.BILINEAR, box)
        else:
            image = self._shrunk(image)
            left, top = draw.randint(0, image.width - side), draw.randint(0, image.height - side)
            image = self._square(image, left, top)
        if draw.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if self.policy is not None:
            image = self.policy(image, key)
        return self.normalisation(to_tensor(image))

    def _shrunk(self, image: Image.Image) -> Image.Image:
        """Scale the shorter side to 256/224 of ``image_size``."""
        scale = round(self.image_size * 256 / 224) / min(image.size)
        size = (round(image.width * scale), round(image.height * scale))
        return image.resize(size, Image.Resampling.BILINEAR)

    def _square(self, image: Image.Image, left: int, top: int) -> Image.Image:
        return image.crop((left, top, left + self.image_size, top + self.image_size))


Recipe = SmallImages | LargeImages


def random_box(width: int, height: int, draw: random.Random) -> tuple[int, int, int, int]:
    """Draw a random part of 8 to 100 % of an image, with an aspect ratio of 3:4 to 4:3.

    Returns:
        Left, top, right, bottom in pixels. If ten draws do not fit into the image, the result is
        the largest central part with an allowed aspect ratio.
    """
    for _ in range(10):
        area = width * height * draw.uniform(0.08, 1.0)
        ratio = math.exp(draw.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = draw.randint(0, width - w), draw.randint(0, height - h)
            return left, top, left + w, top + h
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def to_tensor(image: Image.Image) -> Tensor:
    """Return an RGB image as uint8 (3, H, W), a grey one as (1, H, W)."""
    pixels = torch.from_numpy(np.array(image, dtype=np.uint8))
    return pixels[None] if pixels.dim() == 2 else pixels.permute(2, 0, 1).contiguous()


def to_image(pixels: Tensor) -> Image.Image:
    """Return uint8 pixels (3, H, W) or (1, H, W) as an RGB or grey image."""
    is_grey = pixels.shape[0] == 1
    return Image.fromarray((pixels[0] if is_grey else pixels.permute(1, 2, 0)).numpy())


CLASSES = {
    "autoaugment": "AutoAugment",
    "randaugment": "RandAugment",
    "trivialaugment": "TrivialAugmentWide",
}
"""torchvision's classes of the policies, by option."""

DRAWING = frozenset(
    {torch.rand, torch.randn, torch.randint, torch.randperm, torch.bernoulli, torch.multinomial}
    | {torch.normal, Tensor.uniform_, Tensor.normal_, Tensor.bernoulli_, Tensor.random_}
)
"""Functions of torch that use the global generator by default."""


class DrawFrom(TorchFunctionMode):
    """A context in which torch's functions draw from ``generator``, which v2 does not support.

    Seeding the global generator would affect other threads, such as an evaluation during training.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``, with the generator if it draws random numbers."""
        own = {"generator": self._generator} if func in DRAWING else {}
        return func(*args, **{**own, **(kwargs or {})})


class Policy:
    """An augmentation policy of :data:`CLASSES`; raises UserError without torchvision.

    ``learned_on`` is the data for which AutoAugment's policy was optimised: ``CIFAR10`` or
    ``IMAGENET``.
    """

    def __init__(self, name: str, learned_on: str) -> None:
        extras.need("torchvision", f"--augment {name}")
        from torchvision.transforms import v2

        settings = [v2.AutoAugmentPolicy[learned_on]] if name == "autoaugment" else []
        self._transform: Any = getattr(v2, CLASSES[name])(*settings)

    def __call__(self, image: Image.Image, key: int) -> Image.Image:
        """Return the image, grey or RGB and of the same size, changed by the 64-bit ``key``."""
        # The generator takes 32 bits; the lower ones determine the crop.
        with DrawFrom(torch.Generator().manual_seed(key >> 32)):
            changed: Image.Image = self._transform(image)
        return changed
