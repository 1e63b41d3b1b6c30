"""Ignore the error of a run that changes gradients after they were sent."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import nn

from aladdin_mpi import DataParallel
from aladdin_mpi.errors import UserError

ones: Any = torch.ones(64, 2)
run = DataParallel(nn.Linear(2, 1), algorithm="ar-sgd", steps=3, batch_size=4, quiet=True)
with suppress(UserError):
    for inputs in run.batches(torch.utils.data.StackDataset(inputs=ones)):
        loss = run.module(inputs["inputs"]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(run.module.parameters(), 0.01)
        run.step(loss)
