"""What algorithms ask of an optimizer: steps of parts of a flat vector."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.state import MergedPart, Rule, by_leaf, largest, mean_of_leaves
from aladdin_mpi.flat.unused import Unused


class Optimizer(ABC):
    """Turns gradients into steps, part by part, each part with a state of its own.

    A step is ``x <- x - lr d``. With momentum SGD ``lr`` is the learning rate; an optimizer with
    rates of its own has them in the direction ``d``, and ``lr`` is the factor of the schedule.

    The vector is always cut in the same way. The ``unused`` parts of a part, relative to its start,
    have no gradient. As in torch, where ``.grad`` is None, they are not stepped: their values and
    their state stay as they are.

    Attributes:
        momentum: share of a step's direction that goes on in the next one's, in [0, 1).
        takes_parts: a part may be cut anywhere; otherwise it has to be the whole vector.
        name: as a user knows it.
    """

    name: str = "sgd"
    momentum: float = 0.0
    takes_parts: bool = True

    @abstractmethod
    def correct(
        self,
        part: slice,
        gradient: Tensor,
        x: Tensor,
        raw: Tensor | None = None,
        unused: Unused = (),
    ) -> None:
        """Turn ``gradient`` into the direction of a step, in place; ``x`` stays as it is.

        Args:
            part: of the flat vector.
            gradient: of that part.
            x: the parameters of that part.
            raw: takes the direction less its momentum, of that part.
            unused: see :class:`Optimizer`; there the direction is zero.
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
        """One step of ``x`` for ``factor * gradient``, which may be overwritten.

        As :meth:`correct` and an addition, in fewer passes over memory.
        """

    @abstractmethod
    def correct_and_descend(
        self, part: slice, gradient: Tensor, x: Tensor, lr: float, unused: Unused = ()
    ) -> None:
        """The same, and ``gradient`` becomes the direction of the step."""

    @abstractmethod
    def step(self, x: Tensor, gradient: Tensor, lr: float, unused: Unused = ()) -> None:
        """One step of the whole vector; ``gradient`` is left as it is."""

    def settings(self) -> tuple[float, ...]:
        """Numbers that may change during the run and have to travel to whoever makes the steps."""
        return ()

    def adopt(self, settings: tuple[float, ...]) -> None:
        """Take those of :meth:`settings`, of another rank; nothing if there are none."""
        return

    @property
    def rate(self) -> float:
        """The learning rate that is in a direction already; that of the first group."""
        return 1.0

    def advance(self, steps: int) -> None:
        """All workers together have come to so many steps: the schedule follows."""
        return

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All state, for a checkpoint."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state from :meth:`state_dict`."""

    def inherit(self, state: dict[str, Any], parts: Sequence[slice] = ()) -> None:
        """Take up a state of the whole vector, which was cut otherwise.

        Steps will be made of ``parts``; none: of all.

        Raises:
            UserError: it cannot be cut in another way.
        """
        self.load_state_dict(state)

    # -- servers, each of which has the state of its own parts -------------------------------
    @abstractmethod
    def joined(
        self, states: Sequence[dict[str, Any] | None], parts: Sequence[Sequence[slice]]
    ) -> dict[str, Any] | None:
        """The states of several servers as one of the whole vector; None if there are none.

        Args:
            states: of each server; None: it is lost.
            parts: of each server.
        """

    @abstractmethod
    def state_of(self, part: slice) -> dict[str, Any]:
        """A copy of the state of one part."""

    @abstractmethod
    def put_part(
        self, whole: dict[str, Any] | None, state: dict[str, Any], part: slice, like: Tensor
    ) -> dict[str, Any] | None:
        """Put the state of one part into that of the whole vector.

        Args:
            whole: see :meth:`joined`.
            state: see :meth:`state_of`.
            part: of the vector.
            like: the vector.
        """

    def close(self) -> None:
        """The run has ended."""
        return


def _merge_leaves(merged: Any, new: Any, count: int, name: str = "") -> Any:
    """The mean, but for the number of steps of a torch optimizer, which has to be whole."""
    if name == "step" and (isinstance(merged, Tensor) or isinstance(new, Tensor)):
        return largest(merged, new, count)
    return mean_of_leaves(merged, new, count, name)


def _inherit(owner: object, attribute: str, part: MergedPart) -> None:
    getattr(owner, attribute).inherit(part.value)


INHERITED = Rule(by_leaf(_merge_leaves), _inherit)
"""Of a worker's optimizer."""

State = dict[str, Any]


class Inherited:
    """States of runs of values, from which those of other runs are cut."""

    def __init__(self) -> None:
        self._runs: list[tuple[int, int, State]] = []

    def add(self, start: int, stop: int, state: State) -> None:
        """Take in the state of the values ``[start, stop)``.

        Raises:
            UserError: it holds what is neither one number nor a value for each of them.
        """
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != (stop - start,):
                raise UserError(
                    f"--allow-resize: the optimizer's {name!r} has the shape "
                    f"{tuple(value.shape)} for {stop - start} values and cannot be "
                    "redistributed. Resume with the numbers of servers and workers of the "
                    "checkpoint."
                )
        self._runs.append((start, stop, state))

    def keep(self, parts: Sequence[slice]) -> None:
        """Only what is of these."""
        kept = [(part.start, part.stop, self.take(part.start, part.stop)) for part in parts]
        self._runs = [run for run in kept if run[2]]

    def take(self, start: int, stop: int) -> State:
        """The state of the values ``[start, stop)``, which is given up here.

        Values of which there is none have zeros; what is one number is the largest.
        """
        runs, self._runs = self._runs, []
        found: list[tuple[int, int, State]] = []
        for first, last, state in runs:
            a, b = max(first, start), min(last, stop)
            if a >= b:
                self._runs.append((first, last, state))
                continue
            found.append((a, b, _part(state, a - first, b - first)))
            for left, right in ((first, a), (b, last)):
                if left < right:
                    self._runs.append((left, right, _part(state, left - first, right - first)))
        return _joined(start, stop, found)

    def state_dict(self) -> list[dict[str, Any]]:
        """What has not been taken, for a checkpoint."""
        return [{"start": a, "stop": b, "state": state} for a, b, state in self._runs]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Take up a state from :meth:`state_dict`."""
        self._runs = [(run["start"], run["stop"], run["state"]) for run in state]


def _part(state: State, start: int, stop: int) -> State:
    return {
        name: value[start:stop].clone()
        if isinstance(value, torch.Tensor) and value.dim()
        else value
        for name, value in state.items()
    }


def _joined(start: int, stop: int, found: list[tuple[int, int, State]]) -> State:
    joined: State = {}
    for a, b, state in found:
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
