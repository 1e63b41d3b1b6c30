"""Share evaluation data between batches and at the ends of epochs; end with a missing call."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from aladdin_mpi import DataParallel

FORKED: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}


class Epochs(Dataset[Tensor]):
    """Samples that are the number of the epoch."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(self.epoch)])


def main() -> None:
    model = nn.Linear(1, 1)
    run = DataParallel(model, algorithm="ar-sgd", epochs=2, batch_size=4, run_dir="run", quiet=True)
    numbers = TensorDataset(torch.arange(11.0))
    sums = []

    def evaluate(**settings: Any) -> None:
        loader = DataLoader(numbers, 2, **settings)
        total = sum(batch.sum().item() for (batch,) in run.evaluation_batches(loader))
        sums.append(run.reduce(total, "sum").item())
        sums.append(run.reduce(1 / (7 + run.worker + len(sums))).item())

    for epoch in run.epochs(DataLoader(Epochs(), 4, persistent_workers=True, **FORKED)):
        for batch in epoch:
            assert batch.eq(int(epoch)).all()
            time.sleep(0.05 * run.worker)
            run.step(model(batch).sum().backward())
            evaluate()
        evaluate(**FORKED)
        if int(epoch) == 1:
            print(f"worker {run.worker} of {run.workers}: {sums}", flush=True)
            if run.is_first:
                run.reduce(0.0)
    print("after the loop")


if __name__ == "__main__":
    main()
