"""An optimizer's state by parameter, put together from the parts of the flat vector."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from aladdin_mpi.errors import UserError
from aladdin_mpi.optimizers.inherited import Inherited
from aladdin_mpi.optimizers.part import OptimizerPart

Place = tuple[slice, int, "nn.Parameter"]
"""A parameter's place in the flat vector, its group, and the parameter."""


def states_of_rows(
    places: list[Place],
    parts: Iterable[tuple[int, OptimizerPart]],
    inherited: list[dict[str, Any]],
) -> dict[nn.Parameter, dict[str, Any]] | None:
    """Return copies of the parameters' states from parts that hold rows of values.

    Args:
        places: of the optimizer's parameters.
        parts: each with its start in the flat vector.
        inherited: states that no part has taken over yet, see :meth:`Inherited.state_dict`.

    Returns:
        None if not every value belongs to one of them.

    Raises:
        UserError: a state that is neither one number nor a value for each of the parameter's.
    """
    rows = Inherited()
    covered = 0
    try:
        for run in inherited:
            rows.add(run["start"], run["stop"], run["state"])
            covered += run["stop"] - run["start"]
        for start, part in parts:
            for leaf, piece in part.leaves():
                rows.add(start + piece.start, start + piece.stop, part.state_of(leaf))
                covered += piece.numel
    except UserError as error:
        raise UserError(
            "optimizer.state_dict(): the state of this optimizer cannot be given by parameter. "
            "Use the checkpoints of the run: run_dir=, checkpoint_every= and resume="
        ) from error
    if covered < sum(where.stop - where.start for where, _, _ in places):
        return None
    return {
        parameter: _shaped(rows.take(where.start, where.stop), parameter)
        for where, _, parameter in places
    }


def states_of_parameters(
    places: list[Place], part: OptimizerPart
) -> dict[nn.Parameter, dict[str, Any]]:
    """Return the same from a part that holds whole parameters in their shapes."""
    at = {where.start: parameter for where, _, parameter in places}
    return {at[piece.start]: deepcopy(part.state_of(leaf)) for leaf, piece in part.leaves()}


def _shaped(state: dict[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """The values of a row, in the order of memory, as a tensor like ``parameter``."""
    return {
        name: value.as_strided(parameter.shape, parameter.stride())
        if isinstance(value, torch.Tensor) and value.dim()
        else value
        for name, value in state.items()
    }
