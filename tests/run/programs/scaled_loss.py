"""Train with and without a loss scale, and check that both models are the same.

Arguments: the algorithm; the settings, as JSON; the folder for the runs.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

from aladdin_mpi import DataParallel

algorithm, settings, folder = sys.argv[1:]
generator = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(64, 20, generator=generator), torch.arange(64) % 3)
results = []
for is_scaled in (False, True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 3))
    run = DataParallel(
        model,
        algorithm=algorithm,
        samples=256,
        batch_size=8,
        lr=0.1,
        quiet=True,
        run_dir=f"{folder}/{is_scaled}",
        **json.loads(settings),
    )
    for inputs, labels in run.batches(data):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        (run.scale(loss) if is_scaled else loss).backward()
        run.step(loss)
    results.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
assert torch.equal(*results), (results[0] - results[1]).abs().max()
print("equal", flush=True)
