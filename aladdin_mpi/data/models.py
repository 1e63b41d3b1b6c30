"""Models by name: the small ones, torchvision's, and the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aladdin_mpi.data import models_small
from aladdin_mpi.data.user_code import call_with_accepted, import_function
from aladdin_mpi.errors import UserError
from aladdin_mpi.process import extras

SMALL_MODELS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "digits": models_small.digits,
    "mlp": models_small.mlp,
    "resnet20": models_small.resnet20,
    "resnet56": models_small.resnet56,
    "vgg8_cifar": models_small.vgg8_cifar,
    "vgg16_bn_cifar": models_small.vgg16_bn_cifar,
}


def list_models() -> list[str]:
    """Return the names that :func:`build_model` knows: the small ones, then torchvision's.

    Without torchvision only the small ones.
    """
    if extras.missing("torchvision"):
        return list(SMALL_MODELS)
    import torchvision.models  # as slow to import as torch, and most runs need none of it

    return [*SMALL_MODELS, *torchvision.models.list_models(module=torchvision.models)]


def build_model(
    name: str, num_classes: int, in_channels: int = 3, image_size: int = 32
) -> nn.Module:
    """Return a new model with random weights, drawn from torch's global generator.

    Args:
        name: one of :func:`list_models`, or ``package.module:function``. A function is
            given those of ``num_classes``, ``in_channels``, ``image_size`` that it has
            parameters for, and returns a module.
        num_classes: number of outputs.
        in_channels: channels of the images. torchvision's models take three; one channel
            is repeated three times at their entry, and their weights stay as they are.
        image_size: side of the images in pixels.

    Raises:
        UserError: unknown name, or a model that cannot take such images.
    """
    if ":" in name:
        return _build_users(name, num_classes, in_channels, image_size)
    if name not in SMALL_MODELS and name not in list_models():
        raise UserError(_unknown(name))
    if name not in SMALL_MODELS and in_channels not in (1, 3):
        raise UserError(
            f"--model {name}: takes images of 3 channels (or 1, repeated), the data set has "
            f"{in_channels}; use one of {', '.join(SMALL_MODELS)}"
        )
    build = SMALL_MODELS.get(name, partial(_build_torchvision, name))
    try:
        model = build(num_classes, in_channels, image_size)
        _try(model, in_channels, image_size)
    except (RuntimeError, ValueError, AssertionError) as error:
        raise UserError(
            f"--model {name}: cannot take images of {image_size}x{image_size} pixels ({error}); "
            "use another --model, or images of another size (224 fits most)"
        ) from error
    return model


def _unknown(name: str) -> str:
    if extras.missing("torchvision"):
        return (
            f"--model: expected package.module:function or one of {', '.join(SMALL_MODELS)}, got "
            f"{name!r}; for torchvision's models {extras.command(['torchvision'])}"
        )
    close = get_close_matches(name, list_models())
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return (
        f"--model: unknown model {name!r}; {hint}Expected package.module:function or one of "
        "those that aladdin_mpi.data.models.list_models() returns"
    )


def _build_torchvision(name: str, num_classes: int, in_channels: int, size: int) -> nn.Module:
    import torchvision.models

    builder = torchvision.models.get_model_builder(name)
    options: dict[str, Any] = {"weights": None, "num_classes": num_classes}
    if name in ("googlenet", "inception_v3"):
        # Their auxiliary classifiers would make the output a tuple in training only.
        options |= {"aux_logits": False, "init_weights": True}
    if name.startswith("vit_"):
        options["image_size"] = size
    if name.startswith("maxvit_"):
        options["input_size"] = (size, size)
    model = builder(**options)
    if in_channels == 1:
        model.register_forward_pre_hook(_repeat_channel)
    return model


def _repeat_channel(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Turn the one channel of (N, 1, H, W) into three equal ones."""
    return (inputs[0].expand(-1, 3, -1, -1), *inputs[1:])


def _try(model: nn.Module, in_channels: int, image_size: int) -> None:
    """Pass an empty image through the model, so that a wrong size is found at once."""
    # On "meta" only if the model is there: torch then imports its compiler, which takes as long
    # as all the rest of a rank's start.
    device = next(model.parameters()).device
    image = torch.zeros(1, in_channels, image_size, image_size, device=device)
    with torch.no_grad():
        model.eval()(image)  # in training mode batch norm refuses a single value per channel
    model.train()


def _build_users(name: str, num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    function = import_function("--model", name)
    arguments = {"num_classes": num_classes, "in_channels": in_channels, "image_size": image_size}
    model = call_with_accepted(
        "--model", name, function, arguments, always=frozenset({"num_classes"})
    )
    if not isinstance(model, nn.Module):
        hint = " (did you forget to call it?)" if inspect.isclass(model) else ""
        raise UserError(
            f"--model {name}: must return a torch.nn.Module, not {type(model).__name__}{hint}"
        )
    return model
