"""Train a small model; for `test_commanded_scripts`, with options that a command overrides."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from aladdin_mpi import DataParallel
from aladdin_mpi.options.run import RunOptions


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """A data set whose class a loader process has to find in this file."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((3,), index / 96), torch.tensor(index % 2)


def main() -> None:
    """Train with the options of the script, unless the command has others."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=3)
    parser.add_argument("--spawn", action="store_true")
    parser.add_argument("--optimizer", action="store_true")
    parser.add_argument("--options", action="store_true")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--status", type=int)
    own = parser.parse_args()

    model = nn.Sequential(nn.Linear(3, own.width), nn.Tanh(), nn.Linear(own.width, 2))
    settings: dict[str, Any] = {"algorithm": "easgd", "epochs": 1, "easgd": {"tau": 3}}
    settings["servers"] = own.servers
    if own.options:
        run = DataParallel(model, RunOptions.model_validate(settings))
    elif own.optimizer:
        run = DataParallel(model, optimizer=torch.optim.Adam(model.parameters()), **settings)
    else:
        run = DataParallel(model, **settings)
    loader = DataLoader(
        Rows(),
        8,
        num_workers=int(own.spawn),
        multiprocessing_context="spawn" if own.spawn else None,
    )
    for rows, labels in run.batches(loader):
        loss = nn.functional.cross_entropy(model(rows), labels)
        loss.backward()
        run.step(loss)
        time.sleep(own.pause)
    chosen: Any = run.options
    run.print(
        f"trained {chosen.algorithm}, epochs {chosen.epochs}, samples {chosen.samples}, "
        f"easgd {chosen.easgd.tau} {chosen.easgd.alpha}, width {own.width}"
    )
    if own.status is not None:
        sys.exit(own.status)


if __name__ == "__main__":
    main()
