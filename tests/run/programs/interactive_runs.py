"""Interrupt runs of an interactive session, as in a notebook."""

from __future__ import annotations

import os
import signal
import sys

sys.ps1 = "In : "  # before the package is imported, as in a notebook

import torch  # noqa: E402
from torch import nn  # noqa: E402

from aladdin_mpi import DataParallel  # noqa: E402

model = nn.Linear(8, 1)
for _ in range(3):
    run = DataParallel(model, epochs=1, batch_size=8, run_dir="run", overwrite=True, quiet=True)
    try:
        for batch in run.batches(torch.randn(96, 8)):
            loss = model(batch).mean()
            loss.backward()
            os.kill(os.getpid(), signal.SIGINT)
            run.step(loss)
    except KeyboardInterrupt:
        print("interrupted")
    run.close()
try:
    raise ValueError
except ValueError:
    sys.excepthook(*sys.exc_info())
print("still running")
