"""A model that diverges after five steps, for ``--model diverging:build``."""

from __future__ import annotations

from torch import Tensor, nn


class Net(nn.Sequential):
    steps = 0

    def forward(self, x: Tensor) -> Tensor:
        Net.steps += self.training
        outputs: Tensor = super().forward(x)
        return outputs * (float("nan") if Net.steps > 5 else 1.0)


def build(num_classes: int) -> nn.Module:
    return Net(nn.Flatten(), nn.Linear(64, num_classes))
