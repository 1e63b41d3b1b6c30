"""Exit two loops on rank 0 after their last step; argument: ``break`` or ``error``."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

from aladdin_mpi import DataParallel

data = TensorDataset(torch.ones(64, 2))
for folder in ("first", "second"):
    try:
        with DataParallel(
            nn.Linear(2, 1),
            steps=3,
            algorithm="ar-sgd",
            batch_size=4,
            run_dir=folder,
            quiet=True,
            timeout=30,
        ) as run:
            for number, (inputs,) in enumerate(run.batches(data), start=1):
                loss = run.module(inputs).mean()
                loss.backward()
                run.step(loss)
                if number == 3 and run.is_first:
                    if sys.argv[1] == "break":
                        break
                    raise ValueError
    except ValueError:
        pass
    assert run.is_over
