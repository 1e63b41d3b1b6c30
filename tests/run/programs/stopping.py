"""A model that sends its process a signal, for ``--model stopping:build``.

``STOP`` is RANK:WHEN:SIGNAL, where WHEN is ``build``, ``eval`` or the number of a step.
"""

from __future__ import annotations

import os
import signal
import time

from torch import Tensor, nn

RANK = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
STOP_RANK, STOP_WHEN, STOP_SIGNAL = os.environ.get("STOP", "::").split(":")


def reached(moment: object) -> None:
    if RANK == STOP_RANK and str(moment) == STOP_WHEN:
        for _ in range(2):  # the second signal must have no effect
            os.kill(os.getpid(), getattr(signal, STOP_SIGNAL))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            time.sleep(0.004)
            self.steps += 1
            reached(self.steps)
        else:
            reached("eval")
            time.sleep(float(os.environ.get("EVALUATION_SECONDS", "0")))
        outputs: Tensor = self.layer(x.flatten(1))
        return outputs


def build() -> nn.Module:
    reached("build")
    return Net()
