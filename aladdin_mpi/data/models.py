"""Models by name: small built-in ones, torchvision's, and the user's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aladdin_mpi.data.user_code import call_with_accepted, import_function
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.settings import did_you_mean
from aladdin_mpi.process import extras


def digits(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Return three convolutions with batch norm, about 26,000 parameters, for 8x8 digits."""
    widths = (16, 32, 64)
    layers: list[nn.Module] = []
    for i, (before, after) in enumerate(zip((in_channels, *widths), widths, strict=False)):
        layers += _convolution(before, after)
        layers += [nn.MaxPool2d(2)] if i else []
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * widths[-1], num_classes)
    )


def mlp(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Return a perceptron with two hidden layers of 256 units."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(in_channels * image_size**2, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, num_classes),
    )


class _BasicBlock(nn.Module):
    """A block of two 3x3 convolutions and a shortcut without parameters (He et al., option A)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.stride = stride
        self.new_channels = after - before

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(residual + shortcut)."""
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.stride > 1 or self.new_channels:  # every other pixel, zeros for the new channels
            before = self.new_channels // 2
            x = x[:, :, :: self.stride, :: self.stride]
            x = F.pad(x, (0, 0, 0, 0, before, self.new_channels - before))
        return F.relu(out + x)


class CifarResNet(nn.Module):
    """The residual networks for CIFAR (He et al. 2015, section 4.2).

    Three stages of ``blocks`` blocks with 16, 32 and 64 channels: 6 * ``blocks`` + 2 layers.
    """

    def __init__(self, blocks: int, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_convolution(in_channels, 16))
        stages = []
        before = 16
        for width in (16, 32, 64):
            for _ in range(blocks):
                stages.append(_BasicBlock(before, width, 1 if width == before else 2))
                before = width
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(64, num_classes)
        initialise_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, C, H, W) to logits (N, num_classes)."""
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


def resnet20(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Return He et al.'s 20-layer network for CIFAR, 0.27 million parameters."""
    return CifarResNet(3, num_classes, in_channels)


def resnet56(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Return He et al.'s 56-layer network for CIFAR, 0.85 million parameters."""
    return CifarResNet(9, num_classes, in_channels)


def vgg16_bn_cifar(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Return VGG-16 with batch norm and one linear layer for 32x32 pixels, 14.7 M parameters."""
    return _vgg((2, 2, 3, 3, 3), num_classes, in_channels)


def vgg8_cifar(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Return VGG with one convolution in each of five stages, 3.9 million parameters."""
    return _vgg((1, 1, 1, 1, 1), num_classes, in_channels)


def _vgg(convolutions: Sequence[int], num_classes: int, in_channels: int) -> nn.Module:
    """Return VGG with the given number of convolutions per stage."""
    layers: list[nn.Module] = []
    before = in_channels
    for count, width in zip(convolutions, (64, 128, 256, 512, 512), strict=True):
        for _ in range(count):
            layers += _convolution(before, width)
            before = width
        layers.append(nn.MaxPool2d(2))
    model = nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, num_classes)
    )
    initialise_convolutions(model)
    return model


def _convolution(before: int, after: int) -> list[nn.Module]:
    """Return a 3x3 convolution, batch norm and ReLU."""
    convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(after), nn.ReLU(inplace=True)]


def initialise_convolutions(model: nn.Module) -> None:
    """Initialise convolution weights as in He et al., "Delving deep into rectifiers"."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


SMALL_MODELS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "digits": digits,
    "mlp": mlp,
    "resnet20": resnet20,
    "resnet56": resnet56,
    "vgg8_cifar": vgg8_cifar,
    "vgg16_bn_cifar": vgg16_bn_cifar,
}


def list_models() -> list[str]:
    """Return the names for :func:`build_model`: small models, then torchvision's, if installed."""
    if extras.missing("torchvision"):
        return list(SMALL_MODELS)
    import torchvision.models  # as slow to import as torch, and rarely needed

    return [*SMALL_MODELS, *torchvision.models.list_models(module=torchvision.models)]


def build_model(
    name: str, num_classes: int, in_channels: int = 3, image_size: int = 32
) -> nn.Module:
    """Return a new model with random weights, drawn from torch's global generator.

    Args:
        name: one of :func:`list_models`, or ``package.module:function``. A function receives those
            of the other arguments for which it has parameters, and returns a module.
        num_classes: number of outputs.
        in_channels: channels of the images. torchvision's models take three, or one, which is
            repeated at the input.
        image_size: side of the images in pixels.

    Raises:
        UserError: an unknown name, or a model that does not support such images.
    """
    if ":" in name:
        return _build_users(name, num_classes, in_channels, image_size)
    if name not in SMALL_MODELS and name not in list_models():
        raise UserError(_unknown(name))
    if name not in SMALL_MODELS and in_channels not in (1, 3):
        raise UserError(
            f"--model {name}: expected a data set of images with 3 channels (or 1, repeated), "
            f"got {in_channels}; use one of {', '.join(SMALL_MODELS)}"
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
    return (
        f"--model: expected package.module:function, one of {', '.join(SMALL_MODELS)}, or a model "
        f"of torchvision, such as resnet18, got {name!r}; {did_you_mean(name, list_models())}"
    ).rstrip("; ")


def _build_torchvision(name: str, num_classes: int, in_channels: int, size: int) -> nn.Module:
    import torchvision.models

    builder = torchvision.models.get_model_builder(name)
    options: dict[str, Any] = {"weights": None, "num_classes": num_classes}
    if name in ("googlenet", "inception_v3"):
        # With auxiliary classifiers, the output would be a tuple during training.
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
    """Repeat the channel of (N, 1, H, W) three times."""
    return (inputs[0].expand(-1, 3, -1, -1), *inputs[1:])


def _try(model: nn.Module, in_channels: int, image_size: int) -> None:
    """Pass an empty image through the model to detect unsupported sizes."""
    # Not always on "meta", for which torch imports its compiler, doubling the start-up time.
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
            f"--model {name}: expected a function that returns a torch.nn.Module, got "
            f"{type(model).__name__}{hint}; return the model"
        )
    return model
