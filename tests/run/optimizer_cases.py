"""Custom training loops with an optimizer of the script: each case is a loop with its settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from aladdin_mpi import DataParallel

NUMBERS = torch.randn(64, 6, generator=torch.Generator().manual_seed(5))


def network() -> nn.Sequential:
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))


def groups(model: nn.Module) -> list[dict[str, object]]:
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]


def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.OneCycleLR:
    return torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.02, total_steps=80, cycle_momentum=False
    )


def loss_of(model: nn.Module, numbers: torch.Tensor) -> torch.Tensor:
    return (model(numbers) - numbers.flip(1)).square().mean() * 10


# -- optimizers, built from the model and the rank --------------------------------------------
Make = Callable[[nn.Module, int], torch.optim.Optimizer]


def adamw(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), lr=0.01)


def adafactor(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(groups(model), lr=0.01)


def adam_by_rank(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), weight_decay=rank // 2)


# -- statements between backward() and run.step() ---------------------------------------------
Body = Callable[[DataParallel, torch.optim.lr_scheduler.LRScheduler, int], None]
"""Arguments: the run, the scheduler, and the number of the batch, from 1."""


def nothing(run: DataParallel, scheduler: Any, number: int) -> None:
    """Do nothing."""


def clip(run: DataParallel, scheduler: Any, number: int) -> None:
    run.clip_grad_norm_(0.5)


def clip_later(run: DataParallel, scheduler: Any, number: int) -> None:
    if number > 3:
        run.clip_grad_norm_(0.5)


def step_scheduler(run: DataParallel, scheduler: Any, number: int) -> None:
    scheduler.step()


class Case(NamedTuple):
    """An algorithm, an optimizer, a loop's body, and the settings of ``DataParallel``."""

    algorithm: str
    make: Make
    body: Body = nothing
    settings: dict[str, Any] = {}  # noqa: RUF012


AS_TORCH = {
    "ar-sgd": Case("ar-sgd", adamw),
    "ar-sgd, clip": Case("ar-sgd", adamw, settings={"clip": 0.5}),
    "ar-sgd, clip_grad_norm_": Case("ar-sgd", adamw, clip),
    "ar-sgd, whole parameters": Case("ar-sgd", adafactor),
    "bsp": Case("bsp", adamw),
    "bsp, clip_grad_norm_": Case("bsp", adamw, clip),
}
CLIPPED = {"ar-sgd, clip": "mean", "ar-sgd, clip_grad_norm_": "mean", "bsp, clip_grad_norm_": "own"}
LEARN = {
    algorithm: Case(algorithm, adamw, settings={"samples": 304})
    for algorithm in ("aladdin", "aladdin-ahead", "asp", "osgp", "easgd")
}
LEARN["aladdin-ahead, clip"] = Case("aladdin-ahead", adamw, settings={"samples": 304, "clip": 0.5})
RESUMED = {
    f"{algorithm}, {name}": Case(
        algorithm, adamw, settings={"run_dir": run_dir, "samples": samples, **more}
    )
    for algorithm in ("ar-sgd", "bsp")
    for name, run_dir, samples, more in (
        ("half", f"{algorithm}, on", 48, {}),
        ("other half", f"{algorithm}, on", 96, {"resume": f"{algorithm}, on"}),
        ("straight", f"{algorithm}, straight", 96, {}),
    )
}
REFUSED = {
    "in the middle": Case("aladdin", adamw, clip_later),
    "parts": Case("aladdin-ahead", adamw, clip, {"clip": 0.5}),
    "stepped": Case("ar-sgd", adamw, step_scheduler),
    "multistep": Case("multistep", adamw),
    "rate": Case("ar-sgd", adamw, settings={"lr": 0.1}),
    "server": Case("asp", adamw, settings={"asp": {"momentum": "server"}}),
    "ranks differ": Case("bsp", adam_by_rank),
}
CASES = {**AS_TORCH, **LEARN, **RESUMED, **REFUSED}
