"""A custom loop that can be resumed with other numbers of ranks; arguments: servers, steps."""

from __future__ import annotations

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

from aladdin_mpi import DataParallel

servers, steps = map(int, sys.argv[1:])
torch.manual_seed(0)
inputs = torch.randn(64, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=18)
run = DataParallel(
    model,
    algorithm="bsp",
    optimizer=optimizer,
    scheduler=scheduler,
    accumulate=2,
    servers=servers,
    steps=steps,
    run_dir="run",
    resume="auto",
    allow_resize=True,
)
for epoch in run.epochs(DataLoader(data, 4)):
    for x, y in epoch:
        loss = (model(x) - y).square().mean() / 2
        loss.backward()
        run.step(loss)
        run.state["batches"] = run.state.get("batches", 0) + 1
print(f"rank {run.transport.rank} {scheduler.last_epoch} {run.state}", flush=True)
