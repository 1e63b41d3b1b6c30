"""Train a GAN: the generator learns to produce points on a ring.

mpirun -np 3 python gan.py
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from aladdin_mpi import DataParallel

EPOCHS = 6


def ring(count: int) -> Tensor:
    """Return points (count, 2) near the circle of radius 1."""
    angles = 2 * math.pi * torch.rand(count)
    return torch.stack([angles.cos(), angles.sin()], 1) + 0.02 * torch.randn(count, 2)


def layers(inputs: int, outputs: int) -> nn.Module:
    """Return an MLP with two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, 64),
        nn.LeakyReLU(0.2),
        nn.Linear(64, 64),
        nn.LeakyReLU(0.2),
        nn.Linear(64, outputs),
    )


def judged(scores: Tensor, real: bool) -> Tensor:
    """Return the loss of the scores for points that are all real or all generated."""
    return functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, real))


def distance(maker: nn.Module) -> float:
    """Return the mean distance of generated points from the circle."""
    with torch.no_grad():
        return (maker(torch.randn(512, 4)).norm(dim=1) - 1).abs().mean().item()


def main() -> None:
    """Train both networks."""
    torch.manual_seed(0)
    data = TensorDataset(ring(8192))
    maker, judge = layers(4, 2), layers(2, 1)
    both = nn.ModuleDict({"judge": judge, "maker": maker})
    optimizers = [
        torch.optim.Adam(each.parameters(), 1e-3, betas=(0.5, 0.9)) for each in both.values()
    ]
    loader = DataLoader(data, 32, shuffle=True)
    run = DataParallel(both, optimizer=optimizers, parts=["judge", "maker"], epochs=EPOCHS)
    for epoch in run.epochs(loader):
        for (points,) in epoch:
            made = maker(torch.randn(len(points), 4))
            judge_loss = judged(judge(points), True) + judged(judge(made.detach()), False)
            judge_loss.backward()
            run.step(judge_loss, part="judge")
            maker_loss = judged(judge(made), True)
            maker_loss.backward()
            run.step(maker_loss, part="maker")
        run.print(f"epoch {epoch}: {distance(maker):.3f} from the circle")


if __name__ == "__main__":
    main()
