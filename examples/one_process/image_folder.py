"""Train a residual network with batch norm on images/train/CLASS and images/test/CLASS.

python image_folder.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

EPOCHS = 4
TRAIN = v2.Compose([v2.ToImage(), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)])
TEST = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])


class Block(nn.Module):
    """A residual block: two convolutions and a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, H, W) to (N, C, H, W)."""
        return functional.relu(x + self.layers(x))


def network(classes: int) -> nn.Module:
    """Return a network that maps (N, 3, H, W) to (N, classes)."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Block(16),
        Block(16),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, classes),
    )


def accuracy(model: nn.Module, data: ImageFolder) -> float:
    """Return the fraction of images classified correctly."""
    model.eval()
    with torch.no_grad():
        right = [model(images).argmax(1) == labels for images, labels in DataLoader(data, 64)]
    model.train()
    return torch.cat(right).float().mean().item()


def main() -> None:
    """Train and test."""
    train_data, test_data = ImageFolder("images/train", TRAIN), ImageFolder("images/test", TEST)
    torch.manual_seed(0)
    model = network(len(train_data.classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    for _ in range(EPOCHS):
        for images, labels in DataLoader(train_data, 16, shuffle=True):
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    print(f"accuracy {accuracy(model, test_data):.3f}")


if __name__ == "__main__":
    main()
