"""Train twice in one program."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from aladdin_mpi import DataParallel

data = TensorDataset(torch.randn(64, 3), torch.zeros(64))
for number in 1, 2:
    model = nn.Linear(3, 1)
    run = DataParallel(model, samples=100, batch_size=8, run_dir=f"run-{number}", quiet=True)
    for inputs, _ in run.batches(data):
        loss = model(inputs).square().mean()
        loss.backward()
        run.step(loss)
