"""A plain PyTorch training loop; lines marked with "# +" are added or changed for aladdin_mpi.

mpirun -np 4 python examples/own_loop.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import default_collate

from aladdin_mpi import DataParallel, load_dataset  # +


class Net(nn.Module):
    """A small convolutional network for images of 8x8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.classifier = nn.Linear(32 * 4 * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map (N, 1, 8, 8) to (N, 10)."""
        return self.classifier(self.features(images).flatten(1))


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the fraction of images that the model classifies correctly."""
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def main() -> None:
    """Train and test."""
    data = load_dataset("digits")
    model = Net()
    run = DataParallel(model, algorithm="aladdin-ahead", epochs=10, batch_size=32, lr=0.05)  # +
    for images, labels in run.batches(data.train):  # + instead of a DataLoader
        loss = functional.cross_entropy(model(images), labels, label_smoothing=0.1)
        loss.backward()
        run.step(loss)  # + instead of optimizer.step() and zero_grad()
    if run.is_first:  # +
        images, labels = default_collate([data.test[i] for i in range(len(data.test))])
        print(f"accuracy {accuracy(model, images, labels):.4f}")


if __name__ == "__main__":
    main()
