"""Train with a length in steps, rounded up for each epoch, so that the loop ends before the run.

Arguments: an algorithm and a folder.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from aladdin_mpi import Accelerator

EPOCHS, WORKERS, BATCH = 3, 2, 4
torch.manual_seed(0)
x = torch.randn(50, 4)
loader: Any = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), BATCH)
accelerator = Accelerator(
    steps=EPOCHS * math.ceil(len(loader) / WORKERS),
    algorithm=sys.argv[1],
    run_dir=sys.argv[2],
    quiet=True,
)
model = nn.Linear(4, 1)
optimizer: Any = torch.optim.SGD(model.parameters(), 0.05)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(EPOCHS):
    for inputs, expected in loader:
        accelerator.backward(nn.functional.mse_loss(model(inputs), expected))
        optimizer.step()
        optimizer.zero_grad()
accelerator.wait_for_everyone()
print("end", accelerator.process_index, flush=True)
