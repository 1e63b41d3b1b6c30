"""Classify digits with sharpness-aware minimization (Foret et al., ICLR 2021): two passes per step.

mpirun -np 3 python sam.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from aladdin_mpi import DataParallel, load_dataset

EPOCHS, RHO = 5, 0.05


class Sam:
    """Moves parameters to a nearby point with a larger loss, and back for the optimizer's step."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.parameters = list(model.parameters())
        self.optimizer = optimizer
        self.kept: list[Tensor] = []

    def climb(self, loss: Tensor) -> None:
        """Move along the gradient of ``loss``."""
        gradients = torch.autograd.grad(loss, self.parameters)
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        self.kept = [p.detach().clone() for p in self.parameters]
        with torch.no_grad():
            for p, gradient in zip(self.parameters, gradients, strict=True):
                p.add_(gradient, alpha=RHO / (norm.item() + 1e-12))

    @torch.no_grad()
    def step(self) -> None:
        """Move back, and step along the gradient of the other point."""
        for p, kept in zip(self.parameters, self.kept, strict=True):
            p.copy_(kept)
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> None:
    """Train, and measure the accuracy."""
    torch.manual_seed(0)
    data: Any = load_dataset("digits")
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sam = Sam(model, optimizer)
    run = DataParallel(model, optimizer=optimizer, epochs=EPOCHS)
    for epoch in run.epochs(DataLoader(data.train, 16, shuffle=True)):
        for images, labels in epoch:
            with run.local():
                sam.climb(functional.cross_entropy(model(images), labels))
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()
            run.step(loss)  # from the point before climb()
    batches = DataLoader(data.test, 256)
    correct = sum((model(images).argmax(1) == labels).sum().item() for images, labels in batches)
    run.print(f"accuracy {correct / len(data.test):.3f}")


if __name__ == "__main__":
    main()
