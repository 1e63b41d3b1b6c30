"""Short training runs over MPI whose results on two devices are compared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from mpi4py import MPI

# isort: split
import torch
from torch import nn
from torch.utils.data import Subset

from aladdin_mpi import DataParallel, load_dataset

WORLD = MPI.COMM_WORLD
STEPS = 5
BATCH = 16
DGC = {"compression": "dgc", "dgc": {"sample": 1.0}}
"""Exact selection of the largest values, as on a device; a CPU estimates it from a sample."""
DETERMINISTIC: dict[str, dict[str, Any]] = {
    "ar-sgd": {},
    "ar-sgd ring": {"ar_sgd": {"allreduce": "ring"}},
    "ar-sgd bf16": {"wire": "bf16"},
    "ar-sgd dgc": DGC,
    "ar-sgd int4": {"wire": "int4"},
    "ar-sgd powersgd": {"compression": "powersgd"},
    "ar-sgd island": {"island": "node"},
    "bsp": {},
    "bsp bf16": {"wire": "bf16"},
    "bsp dgc": DGC,
    "bsp host-first": {"bsp": {"host_first": True}},
    "bsp checksum": {"checksum": True},
    "bsp int8": {"wire": "int8"},
    "bsp node": {"node_sums": True},
    "bsp node bf16": {"node_sums": True, "wire": "bf16"},
    "local-sgd": {},
    "local-sgd bf16": {"wire": "bf16"},
    "multistep": {},
    "multistep bf16": {"wire": "bf16"},
    "multistep activations": {"multistep": {"exchange": "activations"}},
    "sgp": {},
    "sgp bf16": {"wire": "bf16"},
}
"""Runs whose result does not depend on the timing of messages, by name: options."""


def network() -> nn.Sequential:
    """Return a convolutional network of 3,800 parameters, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 24),
        nn.ReLU(),
        nn.Linear(24, 10),
    )


def make(module: nn.Module, folder: str, device: str, name: str, **options: Any) -> DataParallel:
    """Return a run of ``STEPS`` steps per worker; the first word of ``name`` is the algorithm."""
    settings = {
        "algorithm": name.split()[0],
        "device": device,
        "samples": BATCH * STEPS * WORLD.size,
        "batch_size": BATCH,
        "lr": 0.02,
        "lr_schedule": "constant",
        "warmup_epochs": 0,
        "bucket_mb": 0.004,
        "run_dir": f"{folder}/{name.replace(' ', '-')}-{device}",
        "quiet": True,
        "overwrite": "resume" not in options,
        **options,
    }
    return DataParallel(module, **settings)


def losses(run: DataParallel, module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the loss of each batch after its backward pass; the step follows."""
    subset: Any = Subset(cast(Any, load_dataset("digits").train), range(480))
    for images, labels in run.batches(subset):
        loss = nn.functional.cross_entropy(module(images), labels)
        loss.backward()
        yield loss
        run.step(loss)


def parameters(module: nn.Module) -> torch.Tensor:
    """Return all parameters as one vector in host memory."""
    return torch.cat([p.detach().cpu().reshape(-1) for p in module.parameters()])
