"""An optimizer's state from a run that cut the flat vector otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from aladdin_mpi.errors import UserError

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
                    f"--allow-resize: the optimizer's {name!r} has the shape {tuple(value.shape)} "
                    f"for {stop - start} values and cannot be cut anew; resume with the numbers "
                    "of servers and workers of the checkpoint"
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
