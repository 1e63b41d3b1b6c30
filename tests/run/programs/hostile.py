"""Train with little of what programs usually have: files, a home, a locale, a current folder."""

from __future__ import annotations

import os
import resource
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

from aladdin_mpi import DataParallel

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    del os.environ["HOME"]  # before MPI starts
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    run = DataParallel(
        model, algorithm="ar-sgd", epochs=1, batch_size=4, run_dir=sys.argv[1], device="cpu"
    )
    elsewhere = f"elsewhere-{run.transport.rank}"
    os.mkdir(elsewhere)
    for step, (batch,) in enumerate(run.batches(TensorDataset(torch.ones(32, 4)))):
        if step == 0:
            os.chdir(elsewhere)
            os.rmdir(f"../{elsewhere}")
        run.step(model(batch).mean().backward())
    run.print("trained")
