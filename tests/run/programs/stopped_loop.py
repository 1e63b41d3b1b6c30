"""A custom loop that can stop itself by SIGUSR1.

Arguments: the folder of the run; the step at which each worker sends the signal, 0 for none.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

from aladdin_mpi import DataParallel

folder, stop_at = sys.argv[1], int(sys.argv[2])
data = TensorDataset(torch.ones(64, 3), torch.zeros(64))
model = nn.Linear(3, 1, bias=False)
run = DataParallel(model, samples=800, batch_size=8, run_dir=folder, resume="auto", quiet=True)
steps = 0
try:
    for inputs, _ in run.batches(data):
        loss = model(inputs).square().mean()
        loss.backward()
        run.step(loss)
        steps += 1
        if steps == stop_at:
            os.kill(os.getpid(), signal.SIGUSR1)
finally:
    print("leaving", flush=True)
print("after the loop", flush=True)
