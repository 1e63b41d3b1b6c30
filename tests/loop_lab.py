"""A custom training loop in simulation: a small network, with any algorithm and options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from aladdin_mpi import DataParallel
from aladdin_mpi.options.algorithms import find_algorithm
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from tests.quadratic import NO_DELAY

WORKERS = 3
LR = 0.1
PLAN: dict[str, Any] = {
    "samples": 48,
    "batch_size": 4,
    "lr": LR,
    "lr_scaling": "none",
    "lr_schedule": "constant",
    "warmup_epochs": 0,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "compute_time": 0.01,
    "eval_every": 0,
    "quiet": True,
}
DATA = TensorDataset(
    torch.randn(48, 24, generator=torch.Generator().manual_seed(1)), torch.arange(48) % 3
)
Step = Callable[[DataParallel, nn.Module, Tensor, Tensor], None]
"""Body of the loop."""


def network() -> nn.Module:
    """Return a network with a first layer whose activations multistep exchanges."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 3))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def loss_of(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(model(inputs), labels)


def plain(run: DataParallel, model: nn.Module, inputs: Tensor, labels: Tensor) -> None:
    loss = loss_of(model, inputs, labels)
    loss.backward()
    run.step(loss)


@dataclass
class Trained:
    """Results of a run: the global model and rank 0's summary."""

    x: Tensor
    summary: dict[str, Any]

    @property
    def moved(self) -> float:
        """Return the distance of the model from its initial values."""
        return (self.x - flat(network())).norm().item()


def train(folder: Path, algorithm: str, step: Step = plain, **settings: Any) -> Trained:
    """Train on three workers, and one server if the algorithm has servers."""
    size = WORKERS + (find_algorithm(algorithm).has_servers)

    def rank(transport: Any) -> Trained:
        model = network()
        options = {**PLAN, "run_dir": folder, "algorithm": algorithm, **settings}
        run = DataParallel(model, transport=transport, **options)
        for inputs, labels in run.batches(DATA):
            step(run, model, inputs, labels)
        return Trained(flat(model), run.summary)

    results: list[Any] = VirtualCluster(size, NO_DELAY).run(rank)
    return Trained(results[-1].x, results[0].summary)
