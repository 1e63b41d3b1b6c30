"""Rows of optimizers and learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

from tests.exactness import models
from tests.exactness.models import mlp, squares, vectors
from tests.exactness.row import (
    ASYNCHRONOUS,
    ONE_WORKER,
    STEPS,
    SYNCHRONOUS,
    Batch,
    Optimizers,
    Plain,
    Row,
    Training,
    on_the_union,
    one_by_one,
    sgd,
    together,
)
from tests.exactness.table_models import ALL, several

Kwargs = dict[str, Any]
CONSTANT: Kwargs = {"lr_scaling": "none", "lr_schedule": "constant", "warmup_epochs": 0}
SIX = {"steps": 6}


def row(
    name: str,
    kind: Callable[..., Optimizer],
    *,
    columns: tuple[str, ...] = ALL,
    model: Callable[[], nn.Module] = mlp,
    **options: Any,
) -> Row:
    """Return a row with an optimizer for all parameters."""
    return Row(
        f"optimizer: {name}",
        model,
        squares,
        vectors,
        optimizer=lambda module: kind(module.parameters(), **options),
        columns=columns,
    )


class Matrices(nn.Module):
    """Two layers without biases, for optimizers that require matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(models.INPUTS, 6, bias=False),
            nn.Tanh(),
            nn.Linear(6, models.OUTPUTS, bias=False),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(inputs)
        return outputs


WHOLE = ("ar-sgd", "one process")
"""Columns that support optimizers of whole parameters."""
torch_optim: Any = torch.optim
LARGE_EPS: Kwargs = {"eps": 1e-3}
"""Prevents a gradient near 0 from turning rounding into a step."""


def two_groups(model: nn.Module) -> list[Kwargs]:
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return [
        {"params": weights, "lr": 0.05, "weight_decay": 0.1},
        {"params": biases, "lr": 0.02, "weight_decay": 0.0},
    ]


def fixed_group(model: nn.Module) -> Optimizer:
    """Return groups of which one is frozen and one has a rate of 0."""
    head = list(model[2].parameters())  # type: ignore[index]
    body = list(model[0].parameters())  # type: ignore[index]
    groups: list[Kwargs] = [
        {"params": body},
        {"params": head[:1], "lr": 0.05},
        {"params": head[1:], "lr": 0.0},
    ]
    return torch.optim.SGD(groups, 0.05, momentum=0.9)


OPTIMIZERS = [
    row("sgd", torch.optim.SGD, lr=0.05),
    row("sgd with momentum", torch.optim.SGD, lr=0.05, momentum=0.9),
    row("sgd, nesterov", torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    row("sgd with weight decay", torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
    row("sgd with dampening", torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.3),
    row("sgd, maximize", torch.optim.SGD, lr=0.01, momentum=0.9, maximize=True),
    row("sgd, foreach", torch.optim.SGD, lr=0.05, momentum=0.9, foreach=True, columns=SYNCHRONOUS),
    row("sgd, fused", torch.optim.SGD, lr=0.05, momentum=0.9, fused=True, columns=SYNCHRONOUS),
    row("adam", torch.optim.Adam, lr=0.01, **LARGE_EPS),
    row("adam, amsgrad", torch.optim.Adam, lr=0.01, amsgrad=True, **LARGE_EPS),
    row("adam, fused", torch.optim.Adam, lr=0.01, fused=True, **LARGE_EPS, columns=SYNCHRONOUS),
    row(
        "adam, rate as a tensor",
        torch.optim.Adam,
        lr=torch.tensor(0.01),
        **LARGE_EPS,
        columns=SYNCHRONOUS,
    ),
    row("adamw", torch.optim.AdamW, lr=0.01, weight_decay=0.1, **LARGE_EPS),
    row("adamw, foreach", torch.optim.AdamW, lr=0.01, foreach=True, **LARGE_EPS),
    row("rmsprop", torch.optim.RMSprop, lr=0.01, **LARGE_EPS),
    row("rmsprop, centered", torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True, eps=0.01),
    row("adagrad", torch.optim.Adagrad, lr=0.05, lr_decay=0.1, eps=0.01),
    row("adadelta", torch.optim.Adadelta, lr=1.0, eps=1e-3),
    row("nadam", torch.optim.NAdam, lr=0.01, **LARGE_EPS),
    row("radam", torch.optim.RAdam, lr=0.01, **LARGE_EPS),
    row("adamax", torch.optim.Adamax, lr=0.01, **LARGE_EPS),
    row("rprop", torch.optim.Rprop, lr=0.01),
    row("asgd", torch.optim.ASGD, lr=0.05, lambd=0.01),
    Row(
        "optimizer: two groups",
        mlp,
        squares,
        vectors,
        optimizer=lambda model: torch.optim.AdamW(two_groups(model), **LARGE_EPS),
        columns=ALL,
    ),
    Row(
        "optimizer: groups without steps",
        models.frozen,
        squares,
        vectors,
        optimizer=fixed_group,
        columns=ALL,
    ),
]
for wanted, model in (("Adafactor", mlp), ("Muon", Matrices)):
    if hasattr(torch.optim, wanted):  # newer versions of torch
        kind = getattr(torch_optim, wanted)
        OPTIMIZERS.append(row(wanted.lower(), kind, lr=0.02, columns=WHOLE, model=model))


# -- forms of an optimizer argument -------------------------------------------------------------
def settings(**given: Any) -> Callable[[nn.Module, Optimizers], Kwargs]:
    return lambda model, optimizer: {**CONSTANT, **given}


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, 0.01, **LARGE_EPS)


def adamw_of(model: nn.Module) -> Optimizer:
    return adamw(model.parameters())


def scaled_rate(plain: Plain) -> None:
    """Multiply the learning rate by the number of workers."""
    for optimizer in plain.optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= plain.workers
    on_the_union(plain)


def by_pattern(model: nn.Module) -> Optimizer:
    weights, biases = ([p for p in model.parameters() if p.dim() == n] for n in (2, 1))
    return torch.optim.SGD(
        [
            {"params": weights, "lr": 0.04, "weight_decay": 0.1},
            {"params": biases, "lr": 0.02, "weight_decay": 0.0},
        ],
        momentum=0.9,
    )


FORMS = [
    Row(
        "given: sgd by settings",
        mlp,
        squares,
        vectors,
        arguments=settings(lr=0.05, momentum=0.9, weight_decay=0.01),
        columns=ALL,
    ),
    Row(
        "given: nesterov by settings",
        mlp,
        squares,
        vectors,
        optimizer=lambda model: torch.optim.SGD(
            model.parameters(), 0.05, momentum=0.8, nesterov=True
        ),
        arguments=settings(lr=0.05, momentum=0.8, nesterov=True, weight_decay=0),
        columns=ALL,
    ),
    Row(
        "given: sgd without momentum by settings",
        mlp,
        squares,
        vectors,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.05),
        arguments=settings(lr=0.05, momentum=0, weight_decay=0),
        columns=ALL,
    ),
    Row(
        "given: rate for one worker",
        mlp,
        squares,
        vectors,
        arguments=settings(lr=0.05, momentum=0.9, weight_decay=0.01, lr_scaling="linear"),
        differences=several("reference/algorithms.md#common-to-all"),
        documented=scaled_rate,
    ),
    Row(
        "given: name",
        mlp,
        squares,
        vectors,
        optimizer=adamw_of,
        arguments=settings(optimizer="adamw", lr=0.01, optimizer_options=LARGE_EPS),
        columns=ALL,
    ),
    Row(
        "given: name with options",
        mlp,
        squares,
        vectors,
        optimizer=lambda model: torch.optim.Adam(
            model.parameters(), 0.02, betas=(0.8, 0.99), amsgrad=True, **LARGE_EPS
        ),
        arguments=settings(
            optimizer="adam",
            lr=0.02,
            optimizer_options={"beta1": 0.8, "beta2": 0.99, "amsgrad": 1, **LARGE_EPS},
        ),
    ),
    Row(
        "given: sgd with options",
        mlp,
        squares,
        vectors,
        optimizer=lambda model: torch.optim.SGD(
            model.parameters(), 0.05, momentum=0.9, dampening=0.25
        ),
        arguments=settings(
            lr=0.05, momentum=0.9, weight_decay=0, optimizer_options={"dampening": 0.25}
        ),
    ),
    Row(
        "given: function",
        models.frozen,
        squares,
        vectors,
        optimizer=lambda model: adamw([p for p in model.parameters() if p.requires_grad]),
        arguments=lambda model, optimizer: {"optimizer": adamw},
        columns=ALL,
    ),
    Row(
        "given: factors by pattern",
        mlp,
        squares,
        vectors,
        optimizer=by_pattern,
        arguments=settings(
            lr=0.04,
            momentum=0.9,
            weight_decay=0.1,
            lr_factors={"*.bias": 0.5},
            decay_factors={"*.bias": 0},
        ),
    ),
]


# -- learning rates ---------------------------------------------------------------------------
def scheduled(
    name: str,
    scheduler: Callable[[Any], LRScheduler],
    optimizer: Callable[[nn.Module], Optimizer] = sgd,
    **more: Any,
) -> Row:
    return Row(
        f"rate: {name}",
        mlp,
        squares,
        vectors,
        optimizer=optimizer,
        scheduler=scheduler,
        **{"settings": SIX, **more},
    )


def warm_up(optimizer: Optimizer) -> LRScheduler:
    parts: list[LRScheduler] = [
        LinearLR(optimizer, 0.1, total_iters=2),
        CosineAnnealingLR(optimizer, 4),
    ]
    return SequentialLR(optimizer, parts, [2])


def step_for_each_worker(plain: Plain) -> None:
    """Step the scheduler once for each worker's step."""
    scheduler = plain.scheduler
    assert scheduler is not None
    for each in plain.rounds:
        plain.zero_grad()
        plain.loss(plain.batch(together(each))).backward()
        plain.step()
        for _ in range(plain.workers - 1):
            scheduler.step()


def set_rate(optimizers: Optimizers | list[Optimizer], rate: float) -> None:
    for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
        for group in optimizer.param_groups:
            group["lr"] = rate


def rate_of(step: int) -> float:
    return 0.08 / step


def train_with_rates(training: Training) -> None:
    """Set each step's learning rate before backward, as nanoGPT does."""
    for batch in training.batches():
        set_rate(training.optimizer, rate_of(training.number))
        loss = training.loss(batch)
        loss.backward()
        training.run.step(loss)


def train_with_later_rates(training: Training) -> None:
    """Set the learning rate of the next step after each step."""
    for batch in training.batches():
        loss = training.loss(batch)
        loss.backward()
        training.run.step(loss)
        set_rate(training.optimizer, rate_of(training.number + 1))


def replay_rates(plain: Plain, rate: Callable[[int, int], float]) -> None:
    """Set ``rate`` as a function of the round, from 1, and the number of samples before it."""
    samples = 0
    for number, each in enumerate(plain.rounds, 1):
        set_rate(plain.optimizers, rate(number, samples))
        samples += sum(map(len, each))
        plain.zero_grad()
        plain.loss(plain.batch(together(each))).backward()
        plain.step()


def train_by_epochs(training: Training) -> None:
    """Step a scheduler at the end of each epoch."""
    assert isinstance(training.optimizer, Optimizer)
    scheduler = StepLR(training.optimizer, 1, 0.5)
    for epoch in training.epochs():
        for batch in epoch:
            loss = training.loss(batch)
            loss.backward()
            training.run.step(loss)
        scheduler.step()


def replay_by_epochs(plain: Plain) -> None:
    replay_rates(plain, lambda number, samples: 0.05 * 0.5 ** plain.epochs[number - 1])


def falling(samples: int) -> float:
    return 1 / (1 + samples / 12)


def cosine(plain: Plain) -> None:
    total = sum(len(batch) for each in plain.rounds for batch in each)
    replay_rates(
        plain, lambda number, samples: 0.05 * 0.5 * (1 + math.cos(math.pi * samples / total))
    )


RATES = [
    scheduled("LambdaLR", partial(LambdaLR, lr_lambda=lambda step: 1 / (1 + step)), columns=ALL),
    scheduled("StepLR", partial(StepLR, step_size=2, gamma=0.3), columns=ALL),
    scheduled("CosineAnnealingLR", partial(CosineAnnealingLR, T_max=6), columns=ALL),
    scheduled(
        "OneCycleLR",
        partial(OneCycleLR, max_lr=0.1, total_steps=7),
        columns=ALL,
    ),
    scheduled(
        "OneCycleLR of Adam's betas",
        partial(OneCycleLR, max_lr=0.02, total_steps=7),
        lambda model: torch.optim.Adam(model.parameters(), **LARGE_EPS),
    ),
    scheduled("warm-up and cosine", warm_up),
    scheduled(
        "scheduler of a run whose length is in samples",
        partial(CosineAnnealingLR, T_max=18),
        settings={"samples": 72},
        differences=several("your-script.md#the-optimizer"),
        documented=step_for_each_worker,
    ),
    Row(
        "rate: set before backward",
        mlp,
        squares,
        vectors,
        settings=SIX,
        train=train_with_rates,
        replay=partial(replay_rates, rate=lambda number, samples: rate_of(number)),
        columns=ALL,
    ),
    Row(
        "rate: set after step",
        mlp,
        squares,
        vectors,
        settings=SIX,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), rate_of(1), momentum=0.9),
        train=train_with_later_rates,
        replay=partial(replay_rates, rate=lambda number, samples: rate_of(number)),
        columns=ALL,
    ),
    Row(
        "rate: scheduler stepped at the ends of epochs",
        mlp,
        squares,
        vectors,
        settings={"epochs": 3},
        train=train_by_epochs,
        replay=replay_by_epochs,
        columns=ALL,
    ),
    Row(
        "rate: schedule by samples",
        mlp,
        squares,
        vectors,
        settings={**SIX, "schedule": falling},
        replay=partial(replay_rates, rate=lambda number, samples: 0.05 * falling(samples)),
        columns=ALL,
    ),
    Row(
        "rate: lr_schedule of an optimizer",
        mlp,
        squares,
        vectors,
        settings={**SIX, "lr_schedule": "cosine"},
        replay=cosine,
        columns=ALL,
    ),
]


# -- gradients that do not depend on the parameters --------------------------------------------
def product(model: nn.Module, batch: Batch) -> torch.Tensor:
    return (model(batch[0]) * batch[1]).mean()


def plain_sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05)


EVERY: tuple[str, ...] = (*SYNCHRONOUS, *ONE_WORKER, *ASYNCHRONOUS)
LINEAR: Mapping[str, Any] = {
    "model": models.Line,
    "loss": product,
    "samples": vectors,
    "optimizer": plain_sgd,
    "replay": one_by_one,
    "columns": EVERY,
    "is_even": False,  # a fast worker takes more batches than the others
}
ORDERLESS = [
    Row("any order: sgd", **LINEAR),
    Row(
        "any order: sgd by settings",
        arguments=settings(lr=0.05, momentum=0, weight_decay=0),
        **LINEAR,
    ),
    Row(
        "any order: small messages",
        settings={"steps": STEPS, "bucket_mb": 0.00002},
        **LINEAR,
    ),
    Row("any order: 8 steps", settings={"steps": 8}, **LINEAR),
]
