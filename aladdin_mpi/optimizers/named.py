"""Torch's optimizers by name, with rates and decay by patterns of parameters' names."""

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
"""Of torch's: one wants a closure, the other sparse gradients."""
BETAS = {"beta1": 0, "beta2": 1}


def known() -> dict[str, Make]:
    """Torch's optimizers by their names in small letters."""
    return {
        name.lower(): each
        for name, each in vars(torch.optim).items()
        if inspect.isclass(each)
        and issubclass(each, torch.optim.Optimizer)
        and each is not torch.optim.Optimizer
        and name not in WANT_MORE
    }


def find(name: str) -> Make:
    """The class called ``name``.

    Raises:
        UserError: there is none.
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
    """``settings`` as ``make`` takes them: betas as a pair, switches as such.

    Raises:
        UserError: it does not take one of them.
    """
    parameters = inspect.signature(make).parameters
    found: dict[str, Any] = {}
    for name, value in settings.items():
        target = "betas" if name in BETAS and name not in parameters else name
        if target not in parameters:
            numeric = [each for each in parameters if each not in ("params", "lr", "weight_decay")]
            names = ", ".join(numeric).replace("betas", ", ".join(BETAS))
            raise UserError(
                f"--optimizer-options: expected one of {names}, got {name!r}; use one of these"
            )
        default = parameters[target].default
        if target == "betas":
            pair = list(found.get("betas", default))
            pair[BETAS[name]] = value
            found["betas"] = tuple(pair)
        elif isinstance(default, bool) or default is None:
            found[target] = bool(value)
        else:
            # Many defaults are written as 0 and mean a number such as 0.9.
            is_whole = isinstance(default, int) and float(value).is_integer()
            found[target] = int(value) if is_whole else value
    return found


def groups(
    module: nn.Module,
    lr: float,
    weight_decay: float | None,
    lr_factors: Mapping[str, float],
    decay_factors: Mapping[str, float],
) -> list[dict[str, Any]]:
    """The trainable parameters of ``module``, those of one rate and one decay together.

    Args:
        module: its parameters' names are as in ``module.named_parameters()``.
        lr: the rate before factors.
        weight_decay: the decay before factors; None: the optimizer's own, for all.
        lr_factors: by pattern, as for files (``head.*``); those that match are multiplied.
        decay_factors: the same.

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
    found: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in named:
        rate, decay = (
            prod((f for pattern, f in factors.items() if fnmatchcase(name, pattern)), start=1.0)
            for factors in (lr_factors, decay_factors)
        )
        found.setdefault((rate, decay), []).append(parameter)
    return [
        {"params": parameters, "lr": lr * rate}
        | ({} if weight_decay is None else {"weight_decay": weight_decay * decay})
        for (rate, decay), parameters in found.items()
    ]
