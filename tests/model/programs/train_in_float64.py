"""Train a float64 model with an all-reduce and with a server, and save its weights."""

from __future__ import annotations

import torch

from tests.model.test_float64 import train

for algorithm in ("ar-sgd", "bsp"):
    weight, _ = train(2 if algorithm != "bsp" else 1, algorithm=algorithm, run_dir=algorithm)
    torch.save(weight, f"{algorithm}.pt")
