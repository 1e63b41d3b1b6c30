"""Set every gradient to zero before ``run.step()``, which is allowed without ``wait_free``."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from aladdin_mpi import DataParallel

data = TensorDataset(torch.ones(64, 3), torch.zeros(64))
model = nn.Linear(3, 1, bias=False)
nn.init.zeros_(model.weight)
run = DataParallel(
    model, samples=64, batch_size=8, wait_free=False, weight_decay=0, run_dir="run", quiet=True
)
for inputs, _ in run.batches(data):
    model(inputs).sum().backward()
    assert model.weight.grad is not None
    torch._foreach_zero_([model.weight.grad])
    run.step()
print(f"weight {model.weight.tolist()}", flush=True)
