"""Augmentation policies of ``torchvision.transforms.v2``, each image's decided by a key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.overrides import TorchFunctionMode

from aladdin_mpi.process import extras

CLASSES = {
    "autoaugment": "AutoAugment",
    "randaugment": "RandAugment",
    "trivialaugment": "TrivialAugmentWide",
}
"""The policies by their names as options, and their classes."""

DRAWING = frozenset(
    {torch.rand, torch.randn, torch.randint, torch.randperm, torch.bernoulli, torch.multinomial}
    | {torch.normal, Tensor.uniform_, Tensor.normal_, Tensor.bernoulli_, Tensor.random_}
)
"""Functions of torch that draw from the global generator unless they are given one."""


class DrawFrom(TorchFunctionMode):
    """In its block torch's functions draw from ``generator``.

    v2 has no argument for one. To seed the global generator instead would not do: other
    threads draw from it, such as an evaluation's beside training.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``, with the generator if it draws."""
        kwargs = kwargs or {}
        if func in DRAWING:
            kwargs = {"generator": self._generator, **kwargs}
        return func(*args, **kwargs)


class Policy:
    """One of :data:`CLASSES`, with torchvision's settings.

    Args:
        name: of the policy.
        learned_on: for AutoAugment, the data that its policy was found for: ``CIFAR10`` or
            ``IMAGENET``.

    Raises:
        UserError: torchvision is not there.
    """

    def __init__(self, name: str, learned_on: str) -> None:
        v2 = _transforms(name)
        settings = [v2.AutoAugmentPolicy[learned_on]] if name == "autoaugment" else []
        self._transform: Callable[[Image.Image], Image.Image] = getattr(v2, CLASSES[name])(
            *settings
        )

    def __call__(self, image: Image.Image, key: int) -> Image.Image:
        """Return the image, grey or RGB, as changed by the 64-bit ``key``; its size stays."""
        # The generator takes 32 bits; the lower ones have placed the crop already.
        with DrawFrom(torch.Generator().manual_seed(key >> 32)):
            return self._transform(image)


def _transforms(name: str) -> Any:
    extras.need("torchvision", f"--augment {name}")
    from torchvision.transforms import v2

    return v2
