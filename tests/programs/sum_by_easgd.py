"""Train a linear model to add up its inputs with EASGD, and print its loss.

Argument: the run's folder.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

from aladdin_mpi import DataParallel

torch.manual_seed(1)
inputs = torch.randn(64, 3)
model = nn.Linear(3, 1)
run = DataParallel(model, algorithm="easgd", samples=640, batch_size=4, run_dir=sys.argv[1])
mean = 0.0
for epoch in run.epochs(TensorDataset(inputs)):
    for (batch,) in epoch:
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        run.step(loss)
    mean = run.reduce(loss).item()
run.print(f"loss {mean:.6f} of {run.transport.size} ranks")
