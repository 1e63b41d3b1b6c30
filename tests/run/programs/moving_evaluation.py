"""Fit a line; for `test_devices`. With a second argument, the evaluation moves the model."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from aladdin_mpi import DataParallel


def main(run_dir: str, moves: bool) -> None:
    """Train, and evaluate in float64 if ``moves``, which gives the parameters new memory."""
    torch.manual_seed(0)
    inputs = torch.randn(96, 3)
    targets = inputs @ torch.tensor([[1.0], [-2.0], [3.0]])
    model = nn.Linear(3, 1)

    def evaluate(trained: nn.Module) -> dict[str, float]:
        if moves:
            trained.double().float()
        return {"test_loss": nn.functional.mse_loss(trained(inputs), targets).item()}

    run = DataParallel(
        model,
        algorithm="bsp",
        epochs=4,
        eval_every=1,
        evaluate=evaluate,
        run_dir=run_dir,
        quiet=True,
    )
    for rows, labels in run.batches(DataLoader(TensorDataset(inputs, targets), 8)):
        loss = nn.functional.mse_loss(model(rows), labels)
        loss.backward()
        run.step(loss)


if __name__ == "__main__":
    main(sys.argv[1], bool(sys.argv[2]))
