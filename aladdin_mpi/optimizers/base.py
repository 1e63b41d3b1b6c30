"""Interface of optimizers: steps of parts of a flat vector."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.state import MergedPart, Rule, by_leaf, largest, mean_of_leaves
from aladdin_mpi.flat.unused import Unused


class Optimizer(ABC):
    """Conversion of gradients into steps, part by part; each part has its own state.

    A step is ``x <- x - lr d``. With momentum SGD ``lr`` is the learning rate; in an optimizer with
    its own rates the direction ``d`` includes them, and ``lr`` is the factor of the schedule.

    The vector is always cut in the same way. The ``unused`` parts of a part, relative to its start,
    have no gradient. They are not stepped, as torch skips a parameter whose ``.grad`` is None:
    their values and their state do not change.

    Attributes:
        momentum: share of a step's direction that is kept in the next one's, in [0, 1).
        lookahead: rounds by which aladdin-ahead computes gradients ahead of the model.
        takes_parts: a part may be cut anywhere; otherwise it has to be the whole vector.
        name: the name in messages.
    """

    name: str = "sgd"
    momentum: float = 0.0
    lookahead: float = 1.0
    takes_parts: bool = True

    @abstractmethod
    def correct(
        self,
        part: slice,
        gradient: Tensor,
        x: Tensor,
        unused: Unused = (),
        workers: float = 1.0,
    ) -> None:
        """Turn ``gradient`` into the direction of a step, in place, without changing ``x``.

        Args:
            part: the part of the flat vector.
            gradient: its gradient.
            x: its parameters.
            unused: see :class:`Optimizer`; the direction is zero there.
            workers: number of workers whose directions are averaged. Adam's are normalised as
                that of their mean gradient is, see :func:`.normalise_by_mean`.
        """

    @abstractmethod
    def descend(
        self,
        part: slice,
        gradient: Tensor,
        x: Tensor,
        lr: float,
        factor: float = 1.0,
        unused: Unused = (),
    ) -> None:
        """Step ``x`` by ``factor * gradient``, which may be overwritten.

        Equivalent to :meth:`correct` and an addition, in fewer memory passes.
        """

    @abstractmethod
    def correct_and_descend(
        self, part: slice, gradient: Tensor, x: Tensor, lr: float, unused: Unused = ()
    ) -> None:
        """Step ``x`` as :meth:`descend`, and turn ``gradient`` into the direction."""

    @abstractmethod
    def step(self, x: Tensor, gradient: Tensor, lr: float, unused: Unused = ()) -> None:
        """Step the whole vector without changing ``gradient``."""

    def mix(self, part: slice, movement: Tensor, x: Tensor, lr: float, weight: float) -> None:
        """Move the first moment towards the one whose steps move the parameters by ``movement``.

        Optimizers without a known first moment do nothing.

        Args:
            part: the part of the flat vector, which need not be one that is stepped.
            movement: change of the parameters in a step; may be overwritten.
            x: its parameters.
            lr: as in a step.
            weight: weight of that moment, from 0 to 1.
        """
        return

    def settings(self) -> tuple[float, ...]:
        """Return numbers that may change during the run and are sent to the rank that steps."""
        return ()

    def adopt(self, settings: tuple[float, ...]) -> None:
        """Adopt another rank's :meth:`settings`, if any."""
        return

    @property
    def rate(self) -> float:
        """Learning rate that the direction includes already; that of the first group."""
        return 1.0

    def advance(self, steps: int) -> None:
        """Advance the schedule to ``steps`` steps of all workers together."""
        return

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return all state, for a checkpoint."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`."""

    def inherit(self, state: dict[str, Any], parts: Sequence[slice] = ()) -> None:
        """Restore a state of the whole vector, which was cut differently.

        Steps will be made for ``parts``; empty: for all.

        Raises:
            UserError: the state cannot be cut differently.
        """
        self.load_state_dict(state)

    # -- servers, each with the state of its parts --------------------------------------------
    @abstractmethod
    def joined(
        self, states: Sequence[dict[str, Any] | None], parts: Sequence[Sequence[slice]]
    ) -> dict[str, Any] | None:
        """Return the states of several servers as one of the whole vector; None without any.

        Args:
            states: state of each server; None for a lost server.
            parts: parts of each server.
        """

    @abstractmethod
    def state_of(self, part: slice) -> dict[str, Any]:
        """Return a copy of the state of one part."""

    @abstractmethod
    def put_part(
        self, whole: dict[str, Any] | None, state: dict[str, Any], part: slice, like: Tensor
    ) -> dict[str, Any] | None:
        """Merge the state of one part into that of the whole vector, and return the result.

        Args:
            whole: state as returned by :meth:`joined`.
            state: state as returned by :meth:`state_of`.
            part: part of the vector.
            like: the vector.
        """

    def close(self) -> None:
        """Close after the end of the run. Does nothing by default."""
        return


def _merge(merged: Any, new: Any, count: int, name: str = "") -> Any:
    """Merge the state of one more worker, whose steps may have cut its parts differently."""
    if _is_cut(merged) and _is_cut(new) and _cuts(merged) != _cuts(new):
        merged, new = _aligned(merged, new)
    return _merge_values(merged, new, count, name)


def _merge_leaf(merged: Any, new: Any, count: int, name: str = "") -> Any:
    """Return the mean, but the largest for a torch optimizer's step count, which is an integer."""
    if isinstance(merged, dict) or isinstance(new, dict):
        return _merge_values(merged or {}, new or {}, count, name)  # not used by one of them
    if name == "step" and (isinstance(merged, Tensor) or isinstance(new, Tensor)):
        return largest(merged, new, count)
    return mean_of_leaves(merged, new, count, name)


_merge_values = by_leaf(_merge_leaf)


def _inherit(owner: object, attribute: str, part: MergedPart) -> None:
    getattr(owner, attribute).inherit(part.value)


INHERITED = Rule(_merge, _inherit)
"""Rule for the state of a worker's optimizer."""

State = dict[str, Any]


class Inherited:
    """States of ranges of values, from which the states of other ranges are cut."""

    def __init__(self) -> None:
        self._runs: list[tuple[int, int, State]] = []

    def add(self, start: int, stop: int, state: State) -> None:
        """Add the state of the values ``[start, stop)``.

        Raises:
            UserError: a tensor is neither a scalar nor of one number for each value.
        """
        _check_rows(start, stop, state)
        self._runs.append((start, stop, state))

    def keep(self, parts: Sequence[slice]) -> None:
        """Keep only the states of ``parts``."""
        kept = [(part.start, part.stop, self.take(part.start, part.stop)) for part in parts]
        self._runs = [run for run in kept if run[2]]

    def take(self, start: int, stop: int) -> State:
        """Remove and return the state of the values ``[start, stop)``.

        Missing values are zero; of scalars the largest is returned.
        """
        runs, self._runs = self._runs, []
        taken: list[tuple[int, int, State]] = []
        for first, last, state in runs:
            a, b = max(first, start), min(last, stop)
            if a >= b:
                self._runs.append((first, last, state))
                continue
            taken.append((a, b, part_of(state, a - first, b - first)))
            for left, right in ((first, a), (b, last)):
                if left < right:
                    self._runs.append((left, right, part_of(state, left - first, right - first)))
        return _joined(start, stop, taken)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the states that have not been taken, for a checkpoint."""
        return [{"start": a, "stop": b, "state": state} for a, b, state in self._runs]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Restore a state from :meth:`state_dict`."""
        self._runs = [(run["start"], run["stop"], run["state"]) for run in state]


def _check_rows(start: int, stop: int, state: State) -> None:
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.shape != (stop - start,):
            raise UserError(
                f"--allow-resize: the optimizer's {name!r} has the shape {tuple(value.shape)} "
                f"for {stop - start} values and cannot be redistributed. Resume with the numbers "
                "of servers and workers of the checkpoint."
            )


def part_of(state: Mapping[str, Any], start: int, stop: int) -> State:
    """Return the part ``[start, stop)`` of the state of a range of values."""
    return {
        name: value[start:stop].clone()
        if isinstance(value, torch.Tensor) and value.dim()
        else value
        for name, value in state.items()
    }


def without_parts(state: Any) -> Any:
    """Return an optimizer's state without its cut into parts, as far as it depends on one.

    The states of the parts' pieces become states of ranges of values, see :class:`Inherited`.

    Raises:
        UserError: an earlier version, which did not describe the pieces, has saved the state.
    """
    if not isinstance(state, dict) or "parts" not in state:
        return state
    ranges = list(state.get("inherited", ()))  # older than the parts, which overwrite them
    for part in state["parts"]:
        pieces, first = part["state"], part["start"]
        if "numbers" not in pieces:
            raise UserError(
                "--allow-resize: an earlier version has written the checkpoint, whose optimizer "
                "state it cannot divide differently. Resume once with the same ranks, and change "
                "them from the next checkpoint on."
            )
        places = zip(pieces["numbers"], pieces["starts"], pieces["stops"], strict=True)
        states = pieces["inner"]["state"]
        ranges += [
            {"start": first + start, "stop": first + stop, "state": states.get(number, {})}
            for number, start, stop in places
        ]
    return {**state, "parts": [], "inherited": ranges}


def _is_cut(state: Any) -> bool:
    return isinstance(state, dict) and bool(state.get("parts") or state.get("inherited"))


def _cuts(state: State) -> list[Any]:
    """Return where the values are cut, in a comparable form."""
    parts = [
        (part["start"], part["stop"], *(part["state"].get(name) for name in ("starts", "numbers")))
        for part in state["parts"]
    ]
    return [parts, [(run["start"], run["stop"]) for run in state.get("inherited", ())]]


def _aligned(*states: State) -> list[State]:
    """Return the states, see :func:`without_parts`, for the same ranges of values."""
    states = tuple(without_parts(state) for state in states)
    runs = [run for state in states for run in state["inherited"]]
    edges = sorted({edge for run in runs for edge in (run["start"], run["stop"])})
    return [{**state, "inherited": _recut(state["inherited"], edges)} for state in states]


def _recut(runs: list[dict[str, Any]], edges: list[int]) -> list[dict[str, Any]]:
    """Cut the states of ranges at all of ``edges``; values without a state get an empty one."""
    cut: list[dict[str, Any]] = [{"start": a, "stop": b, "state": {}} for a, b in pairwise(edges)]
    for run in runs:
        _check_rows(run["start"], run["stop"], run["state"])
        for each in cut[bisect_left(edges, run["start"]) : bisect_left(edges, run["stop"])]:
            each["state"] = part_of(
                run["state"], each["start"] - run["start"], each["stop"] - run["start"]
            )
    return cut


def _joined(start: int, stop: int, pieces: list[tuple[int, int, State]]) -> State:
    joined: State = {}
    for a, b, state in pieces:
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                joined.setdefault(name, value)
            elif not value.dim():
                known = joined.get(name)
                joined[name] = value.clone() if known is None else torch.maximum(known, value)
            else:
                whole = joined.setdefault(name, value.new_zeros(stop - start))
                whole[a - start : b - start] = value
    return joined
