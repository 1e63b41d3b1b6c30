"""First moments of torch optimizers, seen from the movement that their steps cause."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ADAM = (torch.optim.Adam, torch.optim.AdamW)


def mix_first_moment(
    kind: type[torch.optim.Optimizer],
    group: dict[str, Any],
    state: dict[str, Any],
    part: slice,
    movement: Tensor,
    x: Tensor,
    lr: float,
    weight: float,
) -> None:
    """Move the first moment of ``part`` towards the one whose steps move ``x`` by ``movement``.

    Known are the momentum of SGD, in whose steady state a step is ``-lr v`` with Nesterov too, and
    the first moment of Adam and AdamW; other optimizers and parameters without a state are left as
    they are.

    Args:
        kind: class of the optimizer.
        group: hyperparameters.
        state: state of one row of values.
        part: part of the row.
        movement: change of that part in a step; overwritten.
        x: its parameters.
        lr: factor on the group's learning rate.
        weight: weight of the new moment.
    """
    rate = lr * group["lr"]
    if not rate:
        return
    if issubclass(kind, torch.optim.SGD) and state.get("momentum_buffer") is not None:
        state["momentum_buffer"][part].lerp_(movement.div_(-rate), weight)
    elif issubclass(kind, ADAM) and "exp_avg" in state:
        target = movement.div_(-rate)
        target.sub_(x, alpha=_decoupled_decay(kind, group))
        state["exp_avg"][part].lerp_(target.mul_(_step_divisor(group, state, part)), weight)


def normalise_by_mean(
    kind: type[torch.optim.Optimizer],
    group: dict[str, Any],
    direction: Tensor,
    x: Tensor,
    workers: float,
) -> None:
    """Divide Adam's first moment by the second moment of all workers' mean gradient.

    A worker's own second moment v contains the whole noise of its gradients, the mean's an n-th of
    it: v / n + (1 - 1/n) m^2. So a = m / sqrt(v) becomes a / sqrt(1/n + (1 - 1/n) a^2), in place.
    Adam's epsilon is neglected. Directions of optimizers other than Adam and AdamW are left as they
    are.

    Args:
        kind: class of the optimizer.
        group: hyperparameters.
        direction: direction of a step, with the group's rate and weight decay.
        x: its parameters before the step.
        workers: n.
    """
    rate = float(group["lr"])
    if not rate or not issubclass(kind, ADAM):
        return
    decay = _decoupled_decay(kind, group)
    a = direction.div_(rate).sub_(x, alpha=decay)
    divisor = a.square().mul_(1 - 1 / workers).add_(1 / workers).sqrt_()
    a.div_(divisor).add_(x, alpha=decay).mul_(rate)


def _decoupled_decay(kind: type[torch.optim.Optimizer], group: dict[str, Any]) -> float:
    """Return the weight decay that is not part of Adam's gradient."""
    is_decoupled = issubclass(kind, torch.optim.AdamW) or group.get("decoupled_weight_decay")
    return float(group["weight_decay"]) if is_decoupled else 0.0


def _step_divisor(group: dict[str, Any], state: dict[str, Any], part: slice) -> Tensor:
    """Return Adam's divisor of the first moment, with the bias corrections of both moments."""
    first, second = group["betas"]
    name = "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"
    corrected = state[name][part] / (1 - second ** state["step"])
    return corrected.sqrt_().add_(group["eps"]).mul_(1 - first ** state["step"])
