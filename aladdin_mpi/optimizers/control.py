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


Names = list[list[str]]
"""Of hyperparameters, for each group."""


def numeric_names(optimizer: torch.optim.Optimizer) -> Names:
    """Return the names of all numeric hyperparameters, in an order that depends on them alone.

    Ranks that exchange :func:`numbers` determine these once, when the run begins: a scheduler that
    a script makes later adds entries on the ranks that make it, such as "initial_lr".
    """
    return [
        [name for name, value in sorted(hyperparameters(group).items()) if _each(value)]
        for group in optimizer.param_groups
    ]


def numbers(optimizer: torch.optim.Optimizer, names: Names | None = None) -> tuple[float, ...]:
    """Return the numbers in all groups, of ``names`` or of :func:`numeric_names`."""
    found: list[float] = []
    chosen = numeric_names(optimizer) if names is None else names
    for group, numeric in zip(optimizer.param_groups, chosen, strict=False):
        values = hyperparameters(group)
        for name in numeric:
            found += [float(each) for each in _each(values[name])]
    return tuple(found)


def write_numbers(
    optimizer: torch.optim.Optimizer, values: tuple[float, ...], names: Names
) -> None:
    """Put what :func:`numbers` has returned for another optimizer like this one into the groups."""
    left = list(values)
    for group, numeric in zip(optimizer.param_groups, names, strict=False):
        before = hyperparameters(group)
        for name in numeric:
            taken = [_as(type(each), left.pop(0)) for each in _each(before[name])]
            is_sequence = isinstance(before[name], (tuple, list))
            group[name] = type(before[name])(taken) if is_sequence else taken[0]


def _as(kind: type, value: float) -> float:
    """Return a whole number as an int if the one before was; a script may change 0 to 0.01."""
    return int(value) if kind is int and value.is_integer() else value


def _each(value: object) -> list[float]:
    """The numbers that ``value`` is made of, if it is of nothing else."""
    values: list[Any] = list(value) if isinstance(value, (tuple, list)) else [value]
    is_numeric = all(type(each) in (int, float) for each in values)
    return values if is_numeric else []
