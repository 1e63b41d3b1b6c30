"""A model that is narrower on rank 2, for ``--model uneven_model:build``."""

from __future__ import annotations

import os

from torch import nn


def build(num_classes: int) -> nn.Module:
    width = 8 if os.environ["OMPI_COMM_WORLD_RANK"] == "2" else 16
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, num_classes))
