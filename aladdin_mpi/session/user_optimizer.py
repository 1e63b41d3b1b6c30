"""Validation of a run's optimizer, if it is not the built-in momentum SGD."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
)

from aladdin_mpi.data.user_code import import_function
from aladdin_mpi.errors import UserError
from aladdin_mpi.optimizers import named
from aladdin_mpi.optimizers.part import same_kind
from aladdin_mpi.optimizers.script_access import IMPLEMENTATION, ScriptAccess, hyperparameters
from aladdin_mpi.options.run import RunOptions

Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OptimizerInput = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Factory
"""An optimizer, several of one kind for parts of a model, or a function that makes one."""
IN_THE_OPTIMIZER = ("lr", "momentum", "nesterov", "weight_decay", "lr_scaling")
IN_THE_SCHEDULE = ("lr_schedule", "warmup_epochs", "lr_steps", "lr_decay")
AS_GIVEN: dict[str, Any] = {"lr_scaling": "none", "lr_schedule": "constant", "warmup_epochs": 0.0}
"""Settings of a run whose optimizer already includes its rates."""


@dataclass(frozen=True)
class UserOptimizer:
    """An optimizer for a module's parameters, the underlying script objects, and its scheduler."""

    given: torch.optim.Optimizer
    access: ScriptAccess
    scheduler: LRScheduler | None = None

    def describe(self) -> str:
        """Return a description that must be equal on all ranks and in a resumed run."""
        groups = [
            f"{len(group['params'])} parameters, "
            + ", ".join(
                f"{name} {value}"
                for name, value in hyperparameters(group).items()
                if name not in IMPLEMENTATION
            )
            for group in self.given.param_groups
        ]
        kind = type(self.scheduler).__name__ if self.scheduler is not None else "none"
        return f"{type(self.given).__name__}: {'; '.join(groups)}; scheduler {kind}"

    def describe_state(self) -> str:
        """Return the number of parameters with an initial optimizer state."""
        parameters = [p for group in self.given.param_groups for p in group["params"]]
        return f"of {sum(bool(self.given.state.get(p)) for p in parameters)} parameters"


def settings_for(optimizer: object, schedule: object, given: Collection[str]) -> dict[str, Any]:
    """Return the settings that follow from an optimizer object.

    Raises:
        UserError: a setting was passed that the optimizer or the schedule determines.
    """
    for value, names, other, holder in (
        (optimizer, IN_THE_OPTIMIZER, "optimizer", "the optimizer's groups"),
        (schedule, IN_THE_SCHEDULE, "schedule", "the schedule"),
    ):
        for name in names if value is not None else ():
            if name in given:
                raise UserError(
                    f"{name} cannot be combined with {other}. Set it in {holder}, or leave "
                    f"{other} out."
                )
    if optimizer is None:
        return {}
    one = optimizer[0] if isinstance(optimizer, Sequence) and optimizer else optimizer
    name = type(one).__name__ if isinstance(one, torch.optim.Optimizer) else "own"
    return {"optimizer": name, **AS_GIVEN}


def resolve(
    module: nn.Module,
    options: RunOptions,
    optimizer: OptimizerInput | None,
    scheduler: LRScheduler | None,
) -> UserOptimizer | None:
    """Return the run's optimizer; None: the built-in one.

    Raises:
        UserError: it does not fit the module, or cannot be copied for parts of it.
    """
    if optimizer is None:
        made = _named(module, options)
    elif isinstance(optimizer, torch.optim.Optimizer):
        made = optimizer
    elif isinstance(optimizer, Sequence):
        made = _joined(optimizer)
    else:
        made = optimizer([p for p in module.parameters() if p.requires_grad])
        if not isinstance(made, torch.optim.Optimizer):
            raise UserError(
                "optimizer: expected a torch optimizer, or a function that makes one of a list "
                f"of parameters, got one that returns {type(made).__name__}; return the optimizer"
            )
    if made is None:
        if scheduler is not None:
            raise UserError("scheduler requires optimizer. Pass optimizer= too.")
        return None
    _check_optimizer(made, module)
    _check_scheduler(made, scheduler)
    access = ScriptAccess(optimizer if isinstance(optimizer, Sequence) else [made])
    return UserOptimizer(made, access, scheduler)


def _joined(several: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Return one optimizer with all groups, as for a generator and a discriminator."""
    kinds = {type(each).__name__ for each in several}
    if len(kinds) != 1 or not all(isinstance(each, torch.optim.Optimizer) for each in several):
        raise UserError(
            "optimizer: expected several torch optimizers of one kind, got "
            f"{', '.join(sorted(kinds)) or 'none'}; use the same for all parts of the model"
        )
    whole = same_kind(several[0], [group for each in several for group in each.param_groups])
    for each in several:
        whole.state.update(each.state)
    return whole


def _named(module: nn.Module, options: RunOptions) -> torch.optim.Optimizer | None:
    """Return the optimizer named by ``--optimizer``; None for plain momentum SGD."""
    by_pattern = options.lr_factors or options.decay_factors
    if options.optimizer == "sgd" and not by_pattern and not options.optimizer_options:
        return None
    is_own = ":" in options.optimizer
    make: named.Make = (
        import_function("--optimizer", options.optimizer)
        if is_own
        else named.find(options.optimizer)
    )
    settings = dict(options.optimizer_options)
    if options.optimizer == "sgd":
        settings = {"momentum": options.momentum, "nesterov": options.nesterov, **settings}
    decay = options.weight_decay if options.weight_decay or not is_own else None
    groups = named.groups(module, options.lr, decay, options.lr_factors, options.decay_factors)
    arguments = named.arguments(make, settings)
    try:
        return make(groups, **arguments)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"--optimizer {options.optimizer}: {error}; correct --optimizer-options"
        ) from error


def _check_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    name = type(optimizer).__name__
    if hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step"):
        raise UserError(
            f"optimizer: {name} takes two steps for each batch, but run.step() takes one. Pass "
            "the optimizer that it wraps, and call first_step() inside `with run.local():`, as "
            "docs/your-script.md shows for SAM"
        )
    ours = set(module.parameters())
    strange = [p for group in optimizer.param_groups for p in group["params"] if p not in ours]
    inner = [
        key for key, value in vars(optimizer).items() if isinstance(value, torch.optim.Optimizer)
    ]
    hooks = [*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks]
    others = f"{name} with {len(strange)} others"
    for wrong, expected in (
        (strange, f"one for parameters of the model, got {others}; make it of model.parameters()"),
        (
            inner,
            f"one that makes its steps itself, got {name}, which has another in its {inner}; "
            "pass that one",
        ),
        (hooks, f"one without step hooks, got {name} with {len(hooks)}; remove them"),
    ):
        if wrong:
            raise UserError(f"optimizer: expected {expected}")


def check_length(own: UserOptimizer, steps: int) -> None:
    """Check that the scheduler lasts for ``steps`` steps.

    Raises:
        UserError: it would raise an error in the middle of the run.
    """
    if isinstance(own.scheduler, OneCycleLR):
        lasts = own.scheduler.total_steps - own.scheduler.last_epoch
        if lasts < steps:
            raise UserError(
                f"scheduler: OneCycleLR ends after {lasts} steps, but this run makes {steps}. It "
                "advances by one for each batch_size * accumulate samples of any worker, or with "
                f"steps= for each step of all. Make it with total_steps={steps}."
            )


def _check_scheduler(optimizer: torch.optim.Optimizer, scheduler: object) -> None:
    if scheduler is None:
        return
    unsuitable = (ReduceLROnPlateau, ChainedScheduler)
    if isinstance(scheduler, unsuitable) or not isinstance(scheduler, LRScheduler):
        raise UserError(
            "scheduler: expected a torch scheduler that advances with every step, got "
            f"{type(scheduler).__name__}; leave it out, and set the rate in "
            "optimizer.param_groups"
        )
    if scheduler.optimizer is not optimizer:
        raise UserError(
            "scheduler: expected one of the optimizer that was passed, got one of another "
            "optimizer; make it of that optimizer"
        )
