"""A custom training loop with slow steps that prints and logs at the end of each epoch."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

from aladdin_mpi import DataParallel

data = TensorDataset(torch.randn(64, 8), torch.zeros(64, dtype=torch.int64))
run = DataParallel(
    nn.Linear(8, 3), algorithm="aladdin", epochs=3, batch_size=8, lr=0.01, run_dir="run"
)
for epoch in run.epochs(data):
    for inputs, labels in epoch:
        loss = nn.functional.cross_entropy(run.module(inputs), labels)
        loss.backward()
        run.step(loss)
        time.sleep(0.06)
    run.print(f"epoch {epoch} is over")
    run.log(validation=100.0 + int(epoch))
