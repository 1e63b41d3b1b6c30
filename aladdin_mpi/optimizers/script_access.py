"""Access of a training script to its optimizers, while a run makes their steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.shards import is_divided, local, offset_of


@dataclass(frozen=True)
class Segment:
    """Values of one parameter, ``[start, stop)`` in memory order."""

    parameter: nn.Parameter
    start: int
    stop: int


def initial_state(given: torch.optim.Optimizer, segments: list[Segment]) -> dict[str, Any]:
    """Return the state of a tensor made of ``segments``, which are :func:`alike`; may be empty.

    Some optimizers create their state on construction, and a program may have loaded a state.
    """
    states = [given.state.get(segment.parameter, {}) for segment in segments]
    joined: dict[str, Any] = {}
    for name, value in states[0].items():
        if _is_by_value(name, value, segments[0].parameter):
            pairs = zip(states, segments, strict=True)
            joined[name] = torch.cat([_in_memory(state[name], segment) for state, segment in pairs])
        else:
            joined[name] = value.clone() if isinstance(value, torch.Tensor) else value
    return joined


def alike(given: torch.optim.Optimizer, one: nn.Parameter, other: nn.Parameter) -> bool:
    """Return whether the parameters' states are equal, except for the values of tensors."""

    def common(parameter: nn.Parameter) -> dict[str, Any]:
        state = given.state.get(parameter, {})
        return {name: _common(name, value, parameter) for name, value in state.items()}

    return common(one) == common(other)


def _common(name: str, value: object, parameter: nn.Parameter) -> object:
    """Return what a state has in common with those of parameters that are alike."""
    if _is_by_value(name, value, parameter):
        return None
    return value.tolist() if isinstance(value, torch.Tensor) else value


COUNTERS = ("step", "eta", "mu", "mu_product")
"""States of torch's optimizers that are scalars for parameters of any shape."""


def _is_by_value(name: str, value: object, parameter: nn.Parameter) -> bool:
    is_alike = isinstance(value, torch.Tensor) and value.shape == parameter.shape
    return is_alike and (parameter.dim() > 0 or name not in COUNTERS)


def _in_memory(values: Tensor, segment: Segment) -> Tensor:
    """Return the segment's values of a tensor like its parameter, in memory order."""
    if is_divided(values):
        first = offset_of(values)
        return local(values).reshape(-1)[segment.start - first : segment.stop - first].clone()
    parameter = segment.parameter
    laid_out = torch.empty_strided(
        parameter.shape, parameter.stride(), dtype=values.dtype, device=values.device
    ).copy_(values)
    return laid_out.as_strided((parameter.numel(),), (1,))[segment.start : segment.stop]


Hyperparameters = dict[str, Any]
"""Hyperparameters of one group by name, without its parameters."""
IMPLEMENTATION = ("capturable", "foreach", "fused")
"""Hyperparameters that may depend on the device, since they do not change a step."""


def hyperparameters(group: dict[str, Any]) -> Hyperparameters:
    """Return the hyperparameters of ``group``, with scalar tensors and NumPy's as numbers."""
    others = ("params", "param_names")
    return {name: plain(value) for name, value in group.items() if name not in others}


def plain(value: Any) -> Any:
    """Return ``value`` with scalar tensors and NumPy's scalars as numbers, also in containers."""
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.dim() == 0):
        return value.item()
    if type(value) in (tuple, list):
        return type(value)(map(plain, value))
    if type(value) is dict:
        return {name: plain(each) for name, each in value.items()}
    return value


def portable(group: dict[str, Any]) -> Hyperparameters:
    """Return the hyperparameters for other devices, which may not support CUDA graphs."""
    settings = hyperparameters(group)
    return settings | {"capturable": False} if "capturable" in settings else settings


Names = list[list[str]]
"""Names of hyperparameters for each group."""


def numeric_names(optimizer: torch.optim.Optimizer) -> Names:
    """Return the names of all numeric hyperparameters, in sorted order.

    Ranks that exchange :func:`numbers` determine the names once, at the start of the run, since
    a scheduler that a script creates later adds entries such as "initial_lr" on some ranks only.
    """
    return [
        [name for name, value in sorted(hyperparameters(group).items()) if _each(value)]
        for group in optimizer.param_groups
    ]


def numbers(optimizer: torch.optim.Optimizer, names: Names | None = None) -> tuple[float, ...]:
    """Return the numbers in all groups, of ``names`` or of :func:`numeric_names`."""
    values_of_all: list[float] = []
    chosen = numeric_names(optimizer) if names is None else names
    for group, numeric in zip(optimizer.param_groups, chosen, strict=False):
        values = hyperparameters(group)
        for name in numeric:
            values_of_all += [float(each) for each in _each(values[name])]
    return tuple(values_of_all)


def write_numbers(
    optimizer: torch.optim.Optimizer, values: tuple[float, ...], names: Names
) -> None:
    """Write the :func:`numbers` of a similar optimizer into the groups."""
    remaining = list(values)
    for group, numeric in zip(optimizer.param_groups, names, strict=False):
        before = hyperparameters(group)
        for name in numeric:
            taken = [_as(type(each), remaining.pop(0)) for each in _each(before[name])]
            is_sequence = isinstance(before[name], (tuple, list))
            group[name] = type(before[name])(taken) if is_sequence else taken[0]


def _as(kind: type, value: float) -> float:
    """Return an int only if the previous value was one; a script may change 0 to 0.01."""
    return int(value) if kind is int and value.is_integer() else value


def _each(value: object) -> list[float]:
    """Return the numbers in ``value``, or an empty list if it contains anything else."""
    values: list[Any] = list(value) if isinstance(value, (tuple, list)) else [value]
    is_numeric = all(type(each) in (int, float) for each in values)
    return values if is_numeric else []


States = dict["nn.Parameter", dict[str, Any]]


class ScriptAccess:
    """Interface by which a script's optimizers appear to make the run's steps.

    A change of a hyperparameter after the current step has used it is refused.
    ``state_dict()`` returns the state from the run's steps on this rank. When the run ends, that
    state is written into the optimizers. ``given`` are the script's optimizers.
    """

    _hooks_of: ClassVar[WeakKeyDictionary[torch.optim.Optimizer, list[RemovableHandle]]] = (
        WeakKeyDictionary()
    )
    """Hooks of each optimizer's latest run, as a finished run may leave its hooks in place."""

    def __init__(self, given: Sequence[torch.optim.Optimizer] = ()) -> None:
        self._given = given
        self._used: list[tuple[float, ...]] | None = None
        self._is_stepped = False
        self._has_ended = False
        self._states: Callable[[], States | None] | None = None
        self._dtype = torch.float32
        self._hooks: list[RemovableHandle] = []
        for each in given:
            for hook in self._hooks_of.pop(each, []):
                hook.remove()
            hooks = [
                each.register_state_dict_post_hook(self._export),
                each.register_load_state_dict_pre_hook(self._note_load),
            ]
            self._hooks_of[each] = hooks
            self._hooks += hooks

    # -- hyperparameters ------------------------------------------------------------------
    def begin_batch(self) -> None:
        """Start a batch in the script."""
        self._used = None

    def note_use(self) -> None:
        """Record the hyperparameters at their first use in a step."""
        if self._used is None:
            self._used = self._numbers()

    def end_batch(self) -> None:
        """End a batch, in the script's run.step().

        Raises:
            UserError: hyperparameters were changed after the step had used them.
        """
        if self._used is not None and self._used != self._numbers():
            raise UserError(
                "training loop: optimizer.param_groups (such as the learning rate) was changed "
                "between backward() and run.step(), but parts of this step were already sent or "
                "applied during backward(). Change it before backward(), or pass wait_free=False "
                "to DataParallel."
            )
        self._is_stepped = True

    def _numbers(self) -> list[tuple[float, ...]]:
        return [numbers(each) for each in self._given]

    # -- states ---------------------------------------------------------------------------
    def follow(self, states: Callable[[], States | None], dtype: torch.dtype) -> None:
        """Start following a run, or continue in another group of ranks.

        Args:
            states: returns the parameters' states; None if other ranks have some of them.
            dtype: dtype of the run's steps.
        """
        self._states, self._dtype = states, dtype
        for each in self._given:
            # Otherwise a scheduler stepped by the script warns that no step was made before.
            each._opt_called = True  # type: ignore[attr-defined]

    def close(self) -> None:
        """End the run: write the states into the optimizers, if this rank has them."""
        states = self._states() if self._states is not None else None
        self._has_ended, self._states = True, lambda: None  # the states are on other ranks
        if states is None:
            return
        for each in self._given:
            for parameter in _parameters(each):
                if state := states.get(parameter):
                    each.state[parameter] = self._for_script(state, parameter)
        self._release()

    def _for_script(self, state: dict[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
        """Return the state in the parameter's dtype, if the run's steps were in another."""
        if parameter.dtype == self._dtype:
            return state
        return {
            name: value.to(parameter.dtype)
            if _is_by_value(name, value, parameter) and value.dtype == self._dtype
            else value
            for name, value in state.items()
        }

    def _release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _is_given(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer is the script's; the run's own copies share its hooks."""
        return any(optimizer is each for each in self._given)

    def _export(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> dict[str, Any] | None:
        if self._states is None or not self._is_given(optimizer):
            return None
        states = self._states()
        if states is None:
            if not (self._is_stepped or self._has_ended):
                return None
            raise UserError(
                "optimizer.state_dict(): this rank does not have the state of "
                f"{type(optimizer).__name__}, as the steps are made on other ranks (with bsp on "
                "the servers). Leave the call out and use the checkpoints of the run, which "
                "contain it: run_dir=, checkpoint_every= and resume= of DataParallel."
            )
        packed = {
            index: states[parameter]
            for index, parameter in enumerate(_parameters(optimizer))
            if states.get(parameter)
        }
        return {**state, "state": {**state["state"], **packed}}

    def _note_load(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        if self._states is None or not self._is_given(optimizer):
            return
        if not self._has_ended:
            raise UserError(
                "optimizer.load_state_dict() was called during the run, which began with the "
                "state that the optimizer had in run.batches(). Call it before run.batches(), or "
                "continue from a checkpoint of the run with resume=."
            )
        self._release()


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters in the order of a state dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
