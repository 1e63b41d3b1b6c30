"""A torch optimizer's steps for one part of a flat vector."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.unused import Unused
from aladdin_mpi.optimizers.base import Inherited
from aladdin_mpi.optimizers.first_moment import mix_first_moment, normalise_by_mean
from aladdin_mpi.optimizers.script_access import hyperparameters, portable

Place = tuple[slice, int, "nn.Parameter"]
"""A parameter's slice of the flat vector, its group, and the parameter."""


def states_of_rows(
    places: list[Place],
    parts: Iterable[tuple[int, OptimizerPart]],
    inherited: list[dict[str, Any]],
) -> dict[nn.Parameter, dict[str, Any]] | None:
    """Return copies of the parameters' states from parts that hold rows of values.

    Args:
        places: places of the optimizer's parameters.
        parts: parts with their starts in the flat vector.
        inherited: states that no part has taken yet, see :meth:`Inherited.state_dict`.

    Returns:
        The states; None if a part or ``inherited`` does not cover every value.

    Raises:
        UserError: a tensor is neither a scalar nor of one number for each value.
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
    states: dict[nn.Parameter, dict[str, Any]] = {}
    for where, _, parameter in places:
        shape, stride = parameter.shape, parameter.stride()
        states[parameter] = {
            name: value.as_strided(shape, stride)
            if isinstance(value, torch.Tensor) and value.dim()
            else value
            for name, value in rows.take(where.start, where.stop).items()
        }
    return states


def states_of_parameters(
    places: list[Place], part: OptimizerPart
) -> dict[nn.Parameter, dict[str, Any]]:
    """Return copies of the parameters' states from a part that holds whole parameters."""
    at = {where.start: parameter for where, _, parameter in places}
    return {at[piece.start]: deepcopy(part.state_of(leaf)) for leaf, piece in part.leaves()}


@dataclass(frozen=True)
class PartPiece:
    """Values of a part, from ``start`` on, that the optimizer treats as one tensor.

    ``shape`` and ``stride`` are those of a whole parameter; None: a row of values.
    """

    group: int
    start: int
    numel: int
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None

    @property
    def stop(self) -> int:
        """The end of the piece, in the part."""
        return self.start + self.numel

    def of(self, part: Tensor) -> Tensor:
        """Return the piece of a part, as a view."""
        values = part[self.start : self.stop]
        if self.shape is None or self.stride is None:
            return values
        return values.as_strided(self.shape, self.stride, values.storage_offset())


def _differs(value: object, like: Tensor) -> bool:
    """Return whether a value of a state has to be converted to the device or dtype of ``like``.

    An optimizer may keep a state in a wider dtype than that of its parameters.
    """
    # The device of a counter of steps depends on the optimizer.
    if not isinstance(value, Tensor) or not value.dim():
        return False
    is_narrower = value.is_floating_point() and value.element_size() < like.element_size()
    return is_narrower or value.device != like.device


def same_kind(given: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return an optimizer of the class of ``given``, with its attributes but no state.

    The class is not called, since a user's class may require other arguments.
    """
    optimizer: torch.optim.Optimizer = object.__new__(type(given))
    optimizer.__dict__.update(given.__dict__)
    optimizer.__dict__.pop("step", None)  # a scheduler has wrapped the step() of ``given``
    optimizer.state = defaultdict(dict)
    optimizer.param_groups = groups
    return optimizer


class OptimizerPart:
    """A torch optimizer for pieces of a part, following the hyperparameters of ``given``.

    Values that are in no piece do not change. ``like`` has the dtype and device; ``states`` are
    the initial states of the pieces.
    """

    def __init__(
        self,
        given: torch.optim.Optimizer,
        pieces: list[PartPiece],
        like: Tensor,
        states: list[dict[str, Any]],
    ) -> None:
        self.pieces = pieces
        self._stops = [piece.stop for piece in pieces]
        self._given = given
        self._leaves = [torch.nn.Parameter(like.new_empty(0)) for _ in pieces]
        self._groups = sorted({piece.group for piece in pieces})
        self._seen = [hyperparameters(given.param_groups[number]) for number in self._groups]
        leaves: dict[int, list[nn.Parameter]] = {number: [] for number in self._groups}
        for leaf, piece in self.leaves():
            leaves[piece.group].append(leaf)
        self._inner = same_kind(
            given,
            [{**portable(given.param_groups[n]), "params": each} for n, each in leaves.items()],
        )
        for leaf, state in zip(self._leaves, states, strict=True):
            if state:
                self._inner.state[leaf] = state
        if any(_differs(value, like) for state in states for value in state.values()):
            # A state that the script loaded before its model moved to the rank's device, or of
            # parameters of a narrower dtype than others'.
            self._inner.load_state_dict(self._inner.state_dict())

    def step(self, x: Tensor, gradient: Tensor, unused: Unused = ()) -> None:
        """Step the part ``x`` in place, except its ``unused`` parts."""
        self._follow()
        self.split(place for each in unused for place in (each.start, each.stop))
        starts = [each.start for each in unused]
        is_used = False
        for leaf, piece in self.leaves():
            leaf.data, leaf.grad = piece.of(x), None
            before = bisect_right(starts, piece.start)
            if not before or unused[before - 1].stop <= piece.start:
                leaf.grad, is_used = piece.of(gradient), True
        if is_used:
            self._inner.step()
        for leaf in self._leaves:
            leaf.grad = None

    def normalise_by_mean(self, direction: Tensor, x: Tensor, workers: float) -> None:
        """Apply :func:`.normalise_by_mean` to the direction of the step from ``x``."""
        for _, piece in self.leaves():
            group = self._inner.param_groups[self._groups.index(piece.group)]
            kind = type(self._inner)
            normalise_by_mean(kind, group, piece.of(direction), piece.of(x), workers)

    def mix(self, part: slice, movement: Tensor, x: Tensor, lr: float, weight: float) -> None:
        """Mix ``movement`` into the first moments of rows, see :meth:`.Optimizer.mix`.

        ``part`` is relative to this part's start, ``movement`` and ``x`` are as long.
        """
        for leaf, piece in self.leaves():
            start, stop = max(piece.start, part.start), min(piece.stop, part.stop)
            if start >= stop or piece.shape is not None:
                continue
            here = slice(start - part.start, stop - part.start)
            mix_first_moment(
                type(self._inner),
                self._inner.param_groups[self._groups.index(piece.group)],
                self._inner.state.get(leaf, {}),
                slice(start - piece.start, stop - piece.start),
                movement[here],
                x[here],
                lr,
                weight,
            )

    def split(self, places: Iterable[int]) -> None:
        """Split pieces permanently, so that each of the places is the start of one."""
        for at in places:
            self._split(at)

    def _split(self, at: int) -> None:
        """Split the piece at ``at`` permanently, as both halves may then differ in step count."""
        place = bisect_left(self._stops, at)
        piece = self.pieces[place] if place < len(self.pieces) else None
        if piece is None or not piece.start < at < piece.stop:
            return
        cut, rest = at - piece.start, piece.stop - at
        self.pieces[place : place + 1] = [
            replace(piece, numel=cut),
            replace(piece, start=at, numel=rest),
        ]
        self._stops.insert(place, at)
        first, second = self._leaves[place], torch.nn.Parameter(self._leaves[place].new_empty(0))
        self._leaves.insert(place + 1, second)
        params = self._inner.param_groups[self._groups.index(piece.group)]["params"]
        params.insert(next(i for i, leaf in enumerate(params) if leaf is first) + 1, second)
        state = self._inner.state.pop(first, None)
        if state:
            self._inner.state[first], self._inner.state[second] = {}, {}
            for name, value in state.items():
                is_by_value = isinstance(value, torch.Tensor) and value.shape == (piece.numel,)
                halves = value.split([cut, rest]) if is_by_value else (value, deepcopy(value))
                for leaf, half in zip((first, second), halves, strict=True):
                    self._inner.state[leaf][name] = half.clone() if is_by_value else half

    def _follow(self) -> None:
        """Adopt changes of the groups; an optimizer may also change its own."""
        for place, number in enumerate(self._groups):
            now = hyperparameters(self._given.param_groups[number])
            before, group = self._seen[place], self._inner.param_groups[place]
            group.update({name: value for name, value in now.items() if before.get(name) != value})
            self._seen[place] = now

    def leaves(self) -> list[tuple[nn.Parameter, PartPiece]]:
        """Return the pieces, each with the parameter that represents it in the optimizer."""
        return list(zip(self._leaves, self.pieces, strict=True))

    def state_of(self, leaf: nn.Parameter) -> dict[str, Any]:
        """Return the state of a piece; empty if it has made no step."""
        state: dict[str, Any] = self._inner.state.get(leaf, {})
        return state

    def inherit(self, states: Inherited, start: int) -> None:
        """Take the pieces' states from those of ranges; the part begins at ``start``."""
        is_new = True
        for leaf, piece in self.leaves():
            if state := states.take(start + piece.start, start + piece.stop):
                self._inner.state[leaf], is_new = state, False
        if not is_new:
            # Torch moves each value to the device where the optimizer expects it.
            self._inner.load_state_dict(self._inner.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return the pieces' states and hyperparameters, and the adopted ones of ``given``.

        ``numbers`` are the pieces' numbers in the state of the inner optimizer, which counts its
        parameters group by group.
        """
        groups = self._inner.param_groups
        ordered = [leaf for group in groups for leaf in group["params"]]
        numbers = {id(leaf): number for number, leaf in enumerate(ordered)}
        return {
            "inner": self._inner.state_dict(),
            "seen": self._seen,
            "starts": [piece.start for piece in self.pieces],
            "stops": [piece.stop for piece in self.pieces],
            "numbers": [numbers[id(leaf)] for leaf in self._leaves],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`."""
        self.split(state.get("starts", ()))
        self._inner.load_state_dict(state["inner"])
        self._seen = state["seen"]
