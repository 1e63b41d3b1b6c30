"""Torch's optimizers by name, with rates and decay by patterns of parameter names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import torch
from torch import nn

from aladdin_mpi.errors import UserError

Make = Callable[..., "torch.optim.Optimizer"]
WANT_MORE = ("LBFGS", "SparseAdam")
"""Unsupported optimizers: one requires a closure, the other sparse gradients."""
BETAS = {"beta1": 0, "beta2": 1}
OTHER_OPTIONS = {
    "params": "",
    "lr": "; use --lr",
    "weight_decay": "; use --weight-decay",
}
"""Arguments that are not settings, and the options for them."""


def known() -> dict[str, Make]:
    """Return torch's optimizers by their lower-case names."""
    return {
        name.lower(): each
        for name, each in vars(torch.optim).items()
        if inspect.isclass(each)
        and issubclass(each, torch.optim.Optimizer)
        and each is not torch.optim.Optimizer
        and name not in WANT_MORE
    }


def find(name: str) -> Make:
    """Return the class called ``name``.

    Raises:
        UserError: no such class exists.
    """
    makers = known()
    if name not in makers:
        close = get_close_matches(name, makers, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UserError(
            f"--optimizer: expected one of {', '.join(sorted(makers))}, or "
            f"package.module:function, got {name!r}{hint}"
        )
    return makers[name]


def arguments(make: Make, settings: Mapping[str, float]) -> dict[str, Any]:
    """Convert ``settings`` to arguments of ``make``: betas to a pair, flags to bool.

    Raises:
        UserError: it does not accept one of them.
    """
    parameters = inspect.signature(make).parameters
    converted: dict[str, Any] = {}
    for name, value in settings.items():
        target = "betas" if name in BETAS and name not in parameters else name
        if target not in parameters or target in OTHER_OPTIONS:
            numeric = [each for each in parameters if each not in OTHER_OPTIONS]
            names = ", ".join(numeric).replace("betas", ", ".join(BETAS))
            remedy = OTHER_OPTIONS.get(target) or "; use one of these"
            raise UserError(f"--optimizer-options: expected one of {names}, got {name!r}{remedy}")
        default = parameters[target].default
        if target == "betas":
            pair = list(converted.get("betas", default))
            pair[BETAS[name]] = value
            converted["betas"] = tuple(pair)
        elif isinstance(default, bool) or default is None:
            converted[target] = bool(value)
        else:
            # Many defaults are written as 0 but accept a number such as 0.9.
            is_whole = isinstance(default, int) and float(value).is_integer()
            converted[target] = int(value) if is_whole else value
    return converted


def groups(
    module: nn.Module,
    lr: float,
    weight_decay: float | None,
    lr_factors: Mapping[str, float],
    decay_factors: Mapping[str, float],
) -> list[dict[str, Any]]:
    """Group the trainable parameters of ``module`` by learning rate and weight decay.

    Args:
        module: its parameters are named as by ``module.named_parameters()``.
        lr: learning rate before factors.
        weight_decay: weight decay before factors; None: the optimizer's default, for all.
        lr_factors: factors by shell-style pattern (``head.*``); all that match are multiplied.
        decay_factors: the same for weight decay.

    Raises:
        UserError: no parameter matches a pattern.
    """
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    for option, factors in (("--lr-factors", lr_factors), ("--decay-factors", decay_factors)):
        for pattern in factors:
            if not any(fnmatchcase(name, pattern) for name, _ in named):
                raise UserError(
                    f"{option}: expected patterns of parameters' names, got {pattern!r}, which "
                    f"matches none of {len(named)}, such as {named[0][0]!r}; correct the pattern"
                )
    by_factors: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in named:
        rate, decay = (
            prod((f for pattern, f in factors.items() if fnmatchcase(name, pattern)), start=1.0)
            for factors in (lr_factors, decay_factors)
        )
        by_factors.setdefault((rate, decay), []).append(parameter)
    return [
        {"params": parameters, "lr": lr * rate}
        | ({} if weight_decay is None else {"weight_decay": weight_decay * decay})
        for (rate, decay), parameters in by_factors.items()
    ]
