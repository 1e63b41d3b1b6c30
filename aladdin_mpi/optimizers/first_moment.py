"""First moments of torch optimizers, seen from the movement that their steps cause."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
    elif issubclass(kind, torch.optim.Adam | torch.optim.AdamW) and "exp_avg" in state:
        target = movement.div_(-rate)
        if issubclass(kind, torch.optim.AdamW) or group.get("decoupled_weight_decay"):
            target.sub_(x, alpha=group["weight_decay"])
        state["exp_avg"][part].lerp_(target.mul_(_step_divisor(group, state, part)), weight)


def _step_divisor(group: dict[str, Any], state: dict[str, Any], part: slice) -> Tensor:
    """Return Adam's divisor of the first moment, with the bias corrections of both moments."""
    first, second = group["betas"]
    name = "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"
    corrected = state[name][part] / (1 - second ** state["step"])
    return corrected.sqrt_().add_(group["eps"]).mul_(1 - first ** state["step"])
