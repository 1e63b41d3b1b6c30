"""Train on ranks of which some are killed before the first step or after the last.

Arguments: the algorithm; the ranks to kill, separated by commas; ``before`` or ``after``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from aladdin_mpi import DataParallel

algorithm, ranks, moment = sys.argv[1:]
killed = list(map(int, ranks.split(",")))
data = TensorDataset(torch.randn(64, 3), torch.zeros(64))
model = nn.Linear(3, 1)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def evaluate(module: nn.Module) -> dict[str, float]:
    if moment == "after":
        kill(int(Path("pid").read_text()))
        time.sleep(2)
    return {"figure": 1.0}


run = DataParallel(
    model,
    algorithm=algorithm,
    samples=320,
    batch_size=8,
    eval_every=0,
    evaluate=evaluate,
    run_dir="run",
    quiet=True,
)
if run.transport.rank in killed:
    Path("pid").write_text(str(os.getpid()))
    if moment == "before":
        kill(os.getpid())
for inputs, _ in run.batches(data):
    loss = model(inputs).square().mean()
    loss.backward()
    run.step(loss)
