"""The state that an optimizer has before a run, cut as the run cuts its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Segment:
    """Values of one parameter, ``[start, stop)`` in the order in which they lie in memory."""

    parameter: nn.Parameter
    start: int
    stop: int


def initial_state(given: torch.optim.Optimizer, segments: list[Segment]) -> dict[str, Any]:
    """That of a tensor made of ``segments``, of which :func:`alike` holds; empty if there is none.

    Some optimizers make it when they are made; a program may have loaded another.
    """
    states = [given.state.get(segment.parameter, {}) for segment in segments]
    found: dict[str, Any] = {}
    for name, value in states[0].items():
        if _is_by_value(value, segments[0].parameter):
            pairs = zip(states, segments, strict=True)
            found[name] = torch.cat([_in_memory(state[name], segment) for state, segment in pairs])
        else:
            found[name] = value.clone() if isinstance(value, torch.Tensor) else value
    return found


def alike(given: torch.optim.Optimizer, one: nn.Parameter, other: nn.Parameter) -> bool:
    """Whether what their states hold besides a value for each of theirs is the same."""
    return _rest(given, one) == _rest(given, other)


def _rest(given: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    return {
        name: value.tolist() if isinstance(value, torch.Tensor) else value
        for name, value in given.state.get(parameter, {}).items()
        if not _is_by_value(value, parameter)
    }


def _is_by_value(value: object, parameter: nn.Parameter) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0


def _in_memory(values: Tensor, segment: Segment) -> Tensor:
    """Of a tensor like the segment's parameter, the segment's values."""
    parameter = segment.parameter
    laid_out = torch.empty_strided(
        parameter.shape, parameter.stride(), dtype=values.dtype, device=values.device
    ).copy_(values)
    return laid_out.as_strided((parameter.numel(),), (1,))[segment.start : segment.stop]
