"""What an optimizer has to see at once: single values, whole parameters, or the whole model.

It is tried out, on tensors of a few values: nobody has to keep a list of all optimizers.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.errors import UserError
from aladdin_mpi.optimizers.control import portable
from aladdin_mpi.optimizers.part import same_kind

STEPS = 3
LARGEST = 5
"""Values along a dimension of what is tried."""
RATE = 0.01
TOLERANCE = 1e-4
"""Of a step, relative: kernels for other shapes may round otherwise."""


class Granularity(IntEnum):
    """What a step of one value depends on besides itself."""

    VALUE = 0
    PARAMETER = 1
    MODEL = 2


def granularity(given: torch.optim.Optimizer) -> Granularity:
    """That of an optimizer, by trying it with the settings and dimensions of its own groups.

    Raises:
        UserError: its step() fails, as that of one that wants a closure.
    """
    shapes = _shapes(given)
    if not shapes:
        return Granularity.VALUE
    starts = [_values(shape, seed) for seed, (_, shape) in enumerate(shapes)]
    try:
        together = _steps(given, shapes, starts)
        alone = [
            _steps(given, [each], [start])[0] for each, start in zip(shapes, starts, strict=True)
        ]
    except Exception as error:
        raise UserError(
            f"optimizer: expected one whose step() needs no more than gradients, got "
            f"{type(given).__name__}, which failed: {type(error).__name__}: {error}"
        ) from error
    if not _alike(together, alone, starts):
        return Granularity.MODEL
    try:
        cut = [
            _steps_in_pieces(given, each, start) for each, start in zip(shapes, starts, strict=True)
        ]
    except Exception:  # as of one that takes matrices only
        return Granularity.PARAMETER
    return Granularity.VALUE if _alike(alone, cut, starts) else Granularity.PARAMETER


def _shapes(given: torch.optim.Optimizer) -> list[tuple[int, tuple[int, ...]]]:
    """A few small shapes, each with a group, of as many dimensions as those of the parameters."""
    found: set[tuple[int, tuple[int, ...]]] = set()
    for number, group in enumerate(given.param_groups):
        for parameter in filter(torch.Tensor.numel, group["params"]):
            found.add((number, tuple(min(size, LARGEST) for size in parameter.shape)))
    return sorted(found)


def _values(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator)


def _steps(
    given: torch.optim.Optimizer,
    shapes: list[tuple[int, tuple[int, ...]]],
    starts: list[Tensor],
) -> list[Tensor]:
    """Where some steps lead, all tensors in one optimizer."""
    leaves = [torch.nn.Parameter(start.clone()) for start in starts]
    groups: dict[int, dict[str, Any]] = {}
    for leaf, (number, _) in zip(leaves, shapes, strict=True):
        fresh = {**portable(given.param_groups[number]), "lr": RATE, "params": []}
        groups.setdefault(number, fresh)["params"].append(leaf)
    optimizer = same_kind(given, list(groups.values()))
    for step in range(STEPS):
        for leaf in leaves:
            # A gradient of its own for every step, whichever the tensors beside it.
            leaf.grad = torch.sin(leaf.detach() * (step + 2)) + 0.1
        optimizer.step()
    return [leaf.detach() for leaf in leaves]


def _steps_in_pieces(
    given: torch.optim.Optimizer, shape: tuple[int, tuple[int, ...]], start: Tensor
) -> Tensor:
    """The same for one tensor that is cut into two rows of values."""
    flat = start.flatten()
    cut = max(1, flat.numel() // 3)
    pieces = [piece for piece in (flat[:cut], flat[cut:]) if piece.numel()]
    ends = [_steps(given, [(shape[0], (len(piece),))], [piece])[0] for piece in pieces]
    return torch.cat(ends).view(start.shape)


def _alike(one: list[Tensor], other: list[Tensor], starts: list[Tensor]) -> bool:
    """Whether steps are the same, up to rounding."""
    for a, b, start in zip(one, other, starts, strict=True):
        largest = (a - start).abs().max()
        if not (a - b).abs().max() <= TOLERANCE * largest + 1e-12:
            return False
    return True
