"""Fit a line; for `test_compare_scripts`. Its options are overridden by the comparison."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from aladdin_mpi import DataParallel


def main() -> None:
    """Train, with an evaluation of the test loss unless the arguments say otherwise."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--folder", default=".")
    parser.add_argument("--unmeasured", action="store_true")
    own = parser.parse_args()

    print("preparing the data")
    torch.manual_seed(0)
    inputs = torch.randn(96, 3)
    targets = inputs @ torch.tensor([[1.0], [-2.0], [3.0]])
    model = nn.Linear(3, 1)

    def evaluate(trained: nn.Module) -> dict[str, float]:
        with torch.no_grad():
            return {"test_loss": nn.functional.mse_loss(trained(inputs), targets).item()}

    compiled: Any = torch.compile(model, backend="eager")
    os.chdir(own.folder)
    settings: dict[str, Any] = {"run_dir": "own", "resume": "auto", "servers": 2, "epochs": 2}
    run = DataParallel(
        compiled,
        allow_resize=True,
        optimizer=torch.optim.SGD(model.parameters(), own.rate),
        evaluate=None if own.unmeasured else evaluate,
        eval_every=0.5,
        checkpoint_every="1epochs",
        bn_batches=0,
        **settings,
    )
    for rows, labels in run.batches(DataLoader(TensorDataset(inputs, targets), 8, num_workers=1)):
        loss = nn.functional.mse_loss(model(rows), labels)
        loss.backward()
        run.step(loss)


if __name__ == "__main__":
    main()
