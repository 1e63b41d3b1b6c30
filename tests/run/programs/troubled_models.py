"""Models that raise an exception during a run, for ``--model troubled_models:...``.

The time of the exception is written to the file named by ``TROUBLE_FILE``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from torch import Tensor, nn

RANK = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))


def fail(place: str) -> NoReturn:
    Path(os.environ["TROUBLE_FILE"]).write_text(repr(time.time()))
    raise RuntimeError(f"deliberate: {place}")


class Net(nn.Module):
    def __init__(self, trouble: Callable[[Net], None]) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.trouble = trouble
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            time.sleep(0.005)
            self.steps += 1
        self.trouble(self)
        outputs: Tensor = self.layer(x.flatten(1))
        return outputs


def in_a_step(net: Net) -> None:
    if net.training and RANK == "2" and net.steps == 20:
        fail("in a step")


def in_evaluation(net: Net) -> None:
    if not net.training:
        fail("in evaluation")


def in_a_thread(net: Net) -> None:
    if RANK == "1" and net.steps == 20:
        threading.Thread(target=fail, args=("in a thread",)).start()


def good() -> nn.Module:
    return Net(lambda net: None)


def bad_step() -> nn.Module:
    return Net(in_a_step)


def bad_evaluation() -> nn.Module:
    return Net(in_evaluation)


def bad_thread() -> nn.Module:
    return Net(in_a_thread)
