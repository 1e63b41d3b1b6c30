"""A model whose training steps take 10 ms longer."""

from __future__ import annotations

import time

from torch import Tensor, nn


class Slow(nn.Module):
    """A layer that sleeps during training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.01 if self.training else 0)
        y: Tensor = self.layer(x.flatten(1))
        return y


def build() -> nn.Module:
    return Slow()
