"""What a training loop of one's own must not do behind the run's back, noticed and refused."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from aladdin_mpi.errors import UserError


class LoopWatch:
    """Looks at a module's parameters when a batch is handed out, and at its step().

    Args:
        module: whose parameters the run trains.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        self._trained = [p.requires_grad for p in self._names]
        self._versions: list[int] = []
        self._is_first = True
        self._hook = register_optimizer_step_pre_hook(self._refuse_optimizer)

    def begin(self) -> None:
        """A batch is handed out."""
        self._versions = [p._version for p in self._names]

    def end(self) -> None:
        """step() has been called.

        Raises:
            UserError: parameters were changed, frozen or unfrozen meanwhile, or gradients scaled.
        """
        # One look at all of them first: this is done in every step.
        if [p._version for p in self._names] != self._versions:
            self._refuse_changed()
        if [p.requires_grad for p in self._names] != self._trained:
            self._refuse_frozen()
        if self._is_first:
            self._is_first = False
            _refuse_scaler()

    def _refuse_changed(self) -> None:
        for (parameter, name), version in zip(self._names.items(), self._versions, strict=True):
            if parameter._version != version:
                raise UserError(
                    f"training loop: parameter {name} was changed between its batch and step(); "
                    "the optimizer is part of the algorithm: leave out optimizer.step(), and "
                    "whatever else writes to parameters"
                )

    def _refuse_frozen(self) -> None:
        for (parameter, name), trained in zip(self._names.items(), self._trained, strict=True):
            if parameter.requires_grad != trained:
                now = "frozen" if trained else "unfrozen"
                raise UserError(
                    f"training loop: parameter {name} was {now} during the run; set requires_grad "
                    "before DataParallel is made"
                )

    def close(self) -> None:
        """Watch no longer."""
        self._hook.remove()

    def _refuse_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in self._names:
                    raise UserError(
                        f"training loop: {type(optimizer).__name__}.step() was called for "
                        f"parameter {self._names[parameter]}; the optimizer is part of the "
                        "algorithm: leave the call out, and give the optimizer to DataParallel"
                    )


def _refuse_scaler() -> None:
    """A scaler that has scaled a loss: its gradients would be sent as they are."""
    for each in gc.get_objects():
        scales = issubclass(type(each), torch.amp.GradScaler) and each._enabled
        if scales and each._scale is not None:
            raise UserError(
                "training loop: a GradScaler has scaled the loss, and so the gradients; use "
                "run.scale(loss).backward() in its place, or autocast with bfloat16, which needs "
                "no scale"
            )
