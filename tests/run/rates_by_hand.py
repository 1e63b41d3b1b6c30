"""A training loop that sets its learning rates in every way that scripts do."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

from aladdin_mpi.errors import UserError
from aladdin_mpi.run.data_parallel import DataParallel
from tests.messages import check_names

RATES = [2.0**-step for step in range(6)]
"""Learning rates of the steps, all different."""
BETWEEN = 3
"""Step whose rate is set between backward() and run.step()."""


def train(workers: int, **settings: Any) -> tuple[list[float], bool]:
    """Return the rate of each step, and whether a rate was refused.

    The gradient of step k is 1 at value k and 0 elsewhere, so the model reveals every step's rate.
    """
    model = nn.Linear(1, len(RATES), bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATES[0])
    steps = StepLR(optimizer, 1, gamma=0.5)
    plateau = ReduceLROnPlateau(optimizer, patience=-1, factor=0.5)
    run = DataParallel(
        model,
        optimizer=optimizer,
        samples=len(RATES) * workers,
        batch_size=1,
        wire="fp32",
        quiet=True,
        **settings,
    )
    step, was_refused = 0, False
    for epoch in run.epochs(range(workers)):
        for _ in epoch:
            if step == 2:
                set_rate(optimizer, 2)
            loss = model(torch.ones(1, 1))[0, step]
            loss.backward()
            if step == BETWEEN:
                set_rate(optimizer, BETWEEN)
            try:
                run.step(loss)
            except UserError as error:
                check_names(str(error), "backward()", "wait_free=False")
                was_refused = True
                set_rate(optimizer, BETWEEN - 1)
                run.step(loss)
                set_rate(optimizer, BETWEEN)
            step += 1
            if step == 1:
                set_rate(optimizer, 1)
        if step == 4:
            steps.step()
        if step == 5:
            plateau.step(1.0)
    return (-model.weight.detach().flatten()).tolist(), was_refused


def train_by_scheduler(workers: int, **settings: Any) -> list[float]:
    """Train with the same rates set by a scheduler that the run steps."""
    model = nn.Linear(1, len(RATES), bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    settings["scheduler"] = LambdaLR(optimizer, lambda step: 2.0**-step)
    settings["steps"] = len(RATES)
    return _train_in_one_loop(model, optimizer, workers, settings, by_hand=False)


def train_with_short_last_round(workers: int, **settings: Any) -> list[float]:
    """Set the rates at the start of the loop body; one worker has no sample for the last step."""
    model = nn.Linear(1, len(RATES), bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    settings["samples"] = len(RATES) * workers - 1
    return _train_in_one_loop(model, optimizer, workers, settings, by_hand=True)


def train_with_scheduler_made_in_loop(workers: int, **settings: Any) -> list[float]:
    """Start with an integer rate; servers run no loop, and so do not have this scheduler."""
    model = nn.Linear(1, len(RATES), bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    settings["steps"] = len(RATES)
    return _train_in_one_loop(model, optimizer, workers, settings, by_hand=False, by_scheduler=True)


def _train_in_one_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    workers: int,
    settings: dict[str, Any],
    by_hand: bool,
    by_scheduler: bool = False,
) -> list[float]:
    run = DataParallel(
        model, optimizer=optimizer, batch_size=1, wire="fp32", quiet=True, **settings
    )
    scheduler = None
    for step, _ in enumerate(run.batches(range(workers))):
        if by_hand:
            set_rate(optimizer, step)
        if by_scheduler and scheduler is None:
            scheduler = StepLR(optimizer, 1, gamma=0.5)
        loss = model(torch.ones(1, 1))[0, step]
        loss.backward()
        run.step(loss)
        if scheduler is not None:
            scheduler.step()
    (weight,) = model.parameters()
    return (-weight.detach().flatten()).tolist()


def set_rate(optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.param_groups[0]["lr"] = RATES[step]
