"""Print the page faults caused by large allocations before and after a run in this process."""

from __future__ import annotations

import resource

import torch
from torch import nn
from torch.utils.data import TensorDataset

from aladdin_mpi import DataParallel


def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(10_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


faults_before = faults()
model = nn.Linear(3, 1)
run = DataParallel(model, algorithm="ar-sgd", samples=8, batch_size=8, run_dir="run", quiet=True)
for inputs, _ in run.batches(TensorDataset(torch.randn(8, 3), torch.zeros(8))):
    loss = model(inputs).square().mean()
    loss.backward()
    run.step(loss)
print(f"pages {faults_before} {faults()}", flush=True)
