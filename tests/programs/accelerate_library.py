"""A library's trainer for accelerate: two calls of ``prepare``, and an endless loop over steps.

Arguments: an algorithm and a folder.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import aladdin_mpi

# isort: split
import accelerate as library
import torch
from torch.utils.data import DataLoader

STEPS, FOLDER = 12, Path(sys.argv[2])
library.Accelerator = partial(
    aladdin_mpi.Accelerator, steps=STEPS, algorithm=sys.argv[1], run_dir=FOLDER / "run", quiet=True
)


def cycle(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


class Trainer:
    """Trains in steps, of which every process makes the same number."""

    def __init__(self) -> None:
        self.accelerator = library.Accelerator(split_batches=True, mixed_precision="no")
        with self.accelerator.main_process_first():
            if self.accelerator.is_main_process:
                print("once before", flush=True)
                (FOLDER / "ready").touch()
        assert (FOLDER / "ready").exists()
        samples: Any = [torch.full((4,), float(number)) for number in range(24)]
        self.batches = cycle(self.accelerator.prepare(DataLoader(samples, 8, shuffle=True)))
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.Adam(model.parameters())
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def train(self) -> None:
        for step in range(STEPS):
            loss = self.model(next(self.batches)).square().mean()
            self.accelerator.backward(loss)
            self.accelerator.wait_for_everyone()
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if step < STEPS - 1:
                self.accelerator.wait_for_everyone()
        print("end", self.accelerator.process_index, step + 1, loss.item(), flush=True)


trainer = Trainer()
trainer.train()
