"""A training loop in plain PyTorch; the lines marked with "# +" are what aladdin_mpi adds.

mpirun -np 4 python examples/own_loop.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from aladdin_mpi import DataParallel  # +
from aladdin_mpi.data.builtin_sets import read_digits


class Net(nn.Module):
    """A small network for images of 8x8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.classifier = nn.Linear(32 * 4 * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map (N, 1, 8, 8) to (N, 10)."""
        return self.classifier(self.features(images).flatten(1))


def load() -> tuple[TensorDataset, TensorDataset]:
    """Handwritten digits of 8x8 pixels, to train and to test."""
    digits = read_digits()
    images, labels = digits["pixels"].unsqueeze(1) / 16, digits["labels"].long()
    train, test = digits["train"], digits["test"]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """The share of ``data`` that ``model`` names rightly."""
    images, labels = data.tensors
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def main() -> None:
    """Train and test."""
    train_data, test_data = load()
    model = Net()
    run = DataParallel(model, algorithm="aladdin", epochs=10, batch_size=32, lr=0.05)  # +
    for images, labels in run.batches(train_data):  # + where a DataLoader was
        loss = functional.cross_entropy(model(images), labels, label_smoothing=0.1)
        loss.backward()
        run.step(loss)  # + where optimizer.step() and zero_grad() were
    if run.transport.rank == 0:  # +
        print(f"accuracy {accuracy(model, test_data):.4f}")


if __name__ == "__main__":
    main()
