"""The numbers in a torch optimizer's parameter groups, as they stand at the moment.

A learning-rate scheduler writes to them; whoever makes the steps reads them.
"""

from __future__ import annotations

from typing import Any

import torch

Hyperparameters = dict[str, Any]
"""Of one group, by name, less its parameters."""


def hyperparameters(group: dict[str, Any]) -> Hyperparameters:
    """Those of ``group``, with tensors of one value as numbers."""
    return {
        name: value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
        for name, value in group.items()
        if name not in ("params", "param_names")
    }


def portable(group: dict[str, Any]) -> Hyperparameters:
    """The same for tensors elsewhere: of CUDA's graphs, which only some devices have, nothing."""
    found = hyperparameters(group)
    return {**found, "capturable": False} if "capturable" in found else found


def numbers(optimizer: torch.optim.Optimizer) -> tuple[float, ...]:
    """All numbers in all groups, in an order that depends on their names alone."""
    found: list[float] = []
    for group in optimizer.param_groups:
        for _, value in sorted(hyperparameters(group).items()):
            found += [float(each) for each in _each(value)]
    return tuple(found)


def write_numbers(optimizer: torch.optim.Optimizer, values: tuple[float, ...]) -> None:
    """Put what :func:`numbers` has returned for another optimizer like this one into the groups."""
    left = list(values)
    for group in optimizer.param_groups:
        for name, value in sorted(hyperparameters(group).items()):
            taken = [type(each)(left.pop(0)) for each in _each(value)]
            if isinstance(value, (tuple, list)) and taken:
                group[name] = type(value)(taken)
            elif taken:
                group[name] = taken[0]


def _each(value: object) -> list[float]:
    """The numbers that ``value`` is made of, if it is of nothing else."""
    values: list[Any] = list(value) if isinstance(value, (tuple, list)) else [value]
    is_numeric = all(type(each) in (int, float) for each in values)
    return values if is_numeric else []
