"""A model whose process is killed at the step ``KILLED_AT_STEP``, for ``--model mortal:build``."""

from __future__ import annotations

import os
import signal
import time

import torch
from torch import Tensor, nn

RANK = os.environ.get("OMPI_COMM_WORLD_RANK")
LAST = int(os.environ.get("KILLED_AT_STEP", "0"))


class Net(nn.Module):
    """A network that draws random numbers, keeps statistics, and is killed on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(32, 10),
        )
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        # Statistics for evaluations are computed without gradients.
        if self.training and torch.is_grad_enabled():
            time.sleep(0.005 if RANK else 0)
            self.steps += 1
            if self.steps == LAST and RANK in (None, "2"):
                os.kill(os.getpid(), signal.SIGKILL)
        outputs: Tensor = self.layers(x)
        return outputs


def build() -> nn.Module:
    return Net()
