"""Train with a gradient of 1 for every sample, accumulated over parts of a batch.

Argument: the number of samples after which a worker stops the run; 0 to never stop.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

from aladdin_mpi import DataParallel

most = int(sys.argv[1])
# The gradient of every sample is 1, whatever the parameters, and so is that of a batch.
data = TensorDataset(torch.ones(64, 3), torch.zeros(64))
model = nn.Linear(3, 1, bias=False)
nn.init.zeros_(model.weight)
run = DataParallel(
    model,
    samples=240,
    batch_size=8,
    lr=1.0,
    lr_scaling="none",
    lr_schedule="constant",
    warmup_epochs=0,
    momentum=0,
    weight_decay=0,
    run_dir="run",
    algorithm="aladdin",
    aladdin={"normalize": "none"},
    evaluate=lambda module: {"weight": module.weight.mean().item()},  # type: ignore[operator]
    quiet=True,
)
sizes = 0
for inputs, _ in run.batches(data):
    sizes += len(inputs)
    with run.accumulate():
        for part in inputs[:2], inputs[2:4]:
            (model(part).sum() / len(inputs)).backward()
    loss = model(inputs[4:]).sum() / len(inputs)
    loss.backward()
    run.step(loss)
    if most and sizes >= most:
        run.stop()
rank = run.transport.rank
print(f"rank {rank} {run.is_server} {sizes} {model.weight.tolist()}", flush=True)
