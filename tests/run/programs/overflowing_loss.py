"""Train with gradients that overflow in two steps of rank 0, and print the scale of each step.

Argument: the folder of the run.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

from aladdin_mpi import DataParallel

data = TensorDataset(torch.randn(64, 20), torch.arange(64) % 3)
torch.manual_seed(0)
model = nn.Linear(20, 3)
run = DataParallel(
    model,
    algorithm="ar-sgd",
    samples=256,
    batch_size=8,
    lr=0.1,
    quiet=True,
    run_dir=sys.argv[1],
)
scales = []
for number, (inputs, labels) in enumerate(run.batches(data)):
    loss = nn.functional.cross_entropy(model(inputs), labels)
    with torch.no_grad():
        scales.append(int((run.scale(loss) / loss).log2().round()))
    overflows = number in (3, 4) and run.is_first
    (run.scale(loss) * (1e37 if overflows else 1.0)).backward()
    run.step(loss)
assert all(bool(p.isfinite().all()) for p in model.parameters())
print("exponents", *scales, flush=True)
