"""Small networks for small images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def digits(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Three convolutions with batch norm, about 26,000 parameters, made for 8x8 digits."""
    widths = (16, 32, 64)
    layers: list[nn.Module] = []
    for i, (before, after) in enumerate(zip((in_channels, *widths), widths, strict=False)):
        layers += _convolution(before, after)
        layers += [nn.MaxPool2d(2)] if i else []
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * widths[-1], num_classes)
    )


def mlp(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Two hidden layers of 256 units."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(in_channels * image_size**2, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, num_classes),
    )


class _PaddedShortcut(nn.Module):
    """Option A of He et al.: every other pixel, and zeros for the new channels."""

    def __init__(self, stride: int, new_channels: int) -> None:
        super().__init__()
        self.stride = stride
        self.new_channels = new_channels

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, C + new_channels, H / stride, W / stride)."""
        before = self.new_channels // 2
        x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, before, self.new_channels - before))


class _BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        same = stride == 1 and before == after
        self.shortcut = nn.Identity() if same else _PaddedShortcut(stride, after - before)

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(residual + shortcut)."""
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


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
    """He et al.'s 20-layer network for CIFAR, 0.27 million parameters."""
    return CifarResNet(3, num_classes, in_channels)


def resnet56(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """He et al.'s 56-layer network for CIFAR, 0.85 million parameters."""
    return CifarResNet(9, num_classes, in_channels)


def vgg16_bn_cifar(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """VGG-16 with batch norm for 32x32 pixels and one linear layer, 14.7 million parameters."""
    stages = [(64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512)]
    return _vgg(stages, num_classes, in_channels)


def vgg8_cifar(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """One convolution in each of VGG's five stages, 3.9 million parameters."""
    return _vgg([(64,), (128,), (256,), (512,), (512,)], num_classes, in_channels)


def _vgg(stages: Sequence[Sequence[int]], num_classes: int, in_channels: int) -> nn.Module:
    layers: list[nn.Module] = []
    before = in_channels
    for stage in stages:
        for width in stage:
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
    """Draw convolution weights as in He et al., "Delving deep into rectifiers"."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
