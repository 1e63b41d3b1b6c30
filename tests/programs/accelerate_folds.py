"""Train a model for each of two folds, with an accelerator each that is not ended."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from aladdin_mpi import Accelerator

torch.manual_seed(0)
X = torch.randn(48, 4)
DATA = TensorDataset(X, X.sum(1, keepdim=True))
for fold in range(2):
    accelerator = Accelerator(
        epochs=2, algorithm=sys.argv[1], quiet=True, run_dir=f"fold-{fold}", timeout=60
    )
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(DATA, 4))
    for _ in range(2):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
    print(f"fold {fold} rank {accelerator.process_index}", flush=True)
