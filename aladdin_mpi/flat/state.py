"""Declaration of state for checkpoints, and merging it for another number of ranks.

A component declares both in one table, ``SAVED``: its attributes, each with a :class:`Rule`.
When a run is resumed with another number of ranks, rank 0 merges the workers' states one after
another into a :class:`MergedState`, without knowing their keys. Each component of the new
ranks then takes its part.

All workers start from the global model. Of state that differs between workers (momentum,
residuals of compression or rounding) every new worker gets the mean: as gradients are divided
by the number of workers, the total moves the global model as far as before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from aladdin_mpi.errors import UserError


# -- the merged state -------------------------------------------------------------------
@dataclass
class MergedState:
    """Merged state of the ranks that wrote a checkpoint.

    Attributes:
        model: the global model, flat.
        worker: merged states of the workers, without their models.
        server: states of the servers, merged by the algorithm's servers.
        counts: numbers in each worker's state by their paths, such as ``worker.samples``;
            None for a worker that had failed.
        number: number of workers, if it differs from the length of ``counts``.
        granted: samples granted to each worker with this number of workers; empty: unknown.
        keeps_sums: gradients that servers had summed but not applied are still to be applied.
    """

    model: Tensor
    worker: dict[str, Any]
    server: dict[str, Any] = field(default_factory=dict)
    counts: list[dict[str, float] | None] = field(default_factory=list)
    number: int | None = None
    granted: list[int] = field(default_factory=list)
    keeps_sums: bool = True

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.counts) if self.number is None else self.number

    @property
    def survivors(self) -> int:
        """The number of workers whose states have been merged."""
        return sum(each is not None for each in self.counts)

    def total(self, name: str) -> float:
        """Return the sum of a number over all workers."""
        return self.carried(name, 0, 1)

    def carried(self, name: str, worker: int, workers: int) -> float:
        """Return a new worker's initial count, such that the sum over all workers is unchanged."""
        return sum(each.get(name, 0) for each in self.counts[worker::workers] if each is not None)


@dataclass(frozen=True)
class MergedPart:
    """A component's part of the merged state, for one of the new workers.

    Attributes:
        worker: index of the worker among the new ``workers``.
        held_back: factor for residuals of compression, see :data:`HELD_BACK`.
        path: keys of the component.
    """

    merged: MergedState
    worker: int
    workers: int
    held_back: float = 1.0
    path: tuple[str, ...] = ()

    def __getitem__(self, key: str) -> MergedPart:
        return replace(self, path=(*self.path, key))

    @property
    def value(self) -> Any:
        """The merged value."""
        value: Any = self.merged.worker
        for key in self.path:
            value = value[key]
        return value

    @property
    def carried(self) -> int:
        """The initial count of the new worker, see :meth:`MergedState.carried`."""
        return int(self.merged.carried(".".join(self.path), self.worker, self.workers))


# -- rules ------------------------------------------------------------------------------
Put = Callable[[Any, Any, int, str], Any]
"""Function that merges one more rank's value, ``put(merged, new, count, name)``.

``merged`` covers the ``count - 1`` ranks before; None if they have no value. In place if possible.
"""
Take = Callable[[object, str, MergedPart], None]
"""Function that sets an attribute on a new rank: ``take(owner, attribute, part)``."""


class Rule(NamedTuple):
    """How a value is carried over when the run is resumed with another number of ranks."""

    put: Put
    take: Take


def by_leaf(leaf: Put) -> Put:
    """Return a function that merges dicts and lists by merging each value with ``leaf``.

    If lists differ in length, as with a worker that has made no step yet, the longer is taken.
    """

    def put(merged: Any, new: Any, count: int, name: str = "") -> Any:
        if isinstance(merged, dict) and isinstance(new, dict):
            keys = [*merged, *(key for key in new if key not in merged)]
            return {k: put(merged.get(k), new.get(k), count, str(k)) for k in keys}
        if isinstance(merged, list) and isinstance(new, list) and len(merged) == len(new):
            return [put(m, n, count, name) for m, n in zip(merged, new, strict=True)]
        if isinstance(merged, list) and isinstance(new, list):
            return max(merged, new, key=len)
        return leaf(merged, new, count, name)

    return put


def first(merged: Any, new: Any, count: int, name: str = "") -> Any:
    """Return the first rank's value."""
    return new if merged is None else merged


def smallest(merged: Any, new: Any, count: int, name: str = "") -> Any:
    """Return the smallest value of any rank."""
    return new if merged is None else min(merged, new)


def largest(merged: Any, new: Any, count: int, name: str = "") -> Any:
    """Return the largest value of any rank, for a tensor element by element."""
    if merged is None or new is None:
        return first(merged, new, count)
    return torch.maximum(merged, new) if isinstance(new, Tensor) else max(merged, new)


def equal(merged: Tensor | None, new: Tensor | None, count: int, name: str = "") -> Tensor:
    """Return the value of all ranks.

    Raises:
        UserError: the values differ.
    """
    if merged is None or new is None or not torch.equal(merged, new):
        dtype = first(merged, new, count).dtype
        raise UserError(
            f"--allow-resize: the workers' states differ in {name!r}, of {dtype}, which cannot "
            "be averaged. Resume with the number of workers of the checkpoint."
        )
    return merged


def mean_of_leaves(merged: Any, new: Any, count: int, name: str = "") -> Any:
    """Return the mean of floating-point tensors; other tensors must be equal; else the first."""
    if not (isinstance(merged, Tensor) or isinstance(new, Tensor)):
        return first(merged, new, count)
    if not first(merged, new, count).is_floating_point():
        return equal(merged, new, count, name)
    if merged is None:  # counts as zeros
        return new.div_(count)
    if new is None:
        return merged.mul_(1 - 1 / count)
    return merged.add_(new.sub_(merged), alpha=1 / count)  # exact if all are equal


def _mean_or_first(merged: Any, new: Any, count: int, name: str = "") -> Any:
    """Return the mean; of messages, which may differ in size, the first, as all are dropped."""
    tensors = isinstance(merged, Tensor) and isinstance(new, Tensor)
    if tensors and merged.shape != new.shape:
        return merged
    return mean_of_leaves(merged, new, count, name)


mean = by_leaf(_mean_or_first)


def _by_component(owner: object, attribute: str, part: MergedPart) -> None:
    component = attrgetter(attribute)(owner)
    if hasattr(component, "take_merged"):
        component.take_merged(part)


def _assign(owner: object, attribute: str, part: MergedPart) -> None:
    _load(owner, attribute, part.value)


def _drop(owner: object, attribute: str, part: MergedPart) -> None:
    """Ignore the state."""


def _count_on(owner: object, attribute: str, part: MergedPart) -> None:
    setattr(owner, attribute, part.carried)


def _hold_back(owner: object, attribute: str, part: MergedPart) -> None:
    codec = attrgetter(attribute)(owner)
    codec.load_state_dict(part.value)
    codec.scale_held_back(part.held_back)


RESTART = Rule(mean, _by_component)
"""Each new rank starts afresh, except for components, which have their own rules."""
DROPPED = Rule(first, _drop)
"""Each new rank starts afresh, whatever the value is."""
FIRST = Rule(first, _assign)
SMALLEST = Rule(smallest, _assign)
LARGEST = Rule(largest, _assign)
MEAN = Rule(mean, _assign)
TOTAL = Rule(first, _count_on)
"""A count, whose sum over all ranks stays the same."""
HELD_BACK = Rule(mean, _hold_back)
"""For a codec: the mean of the residuals; if gradients are not divided by the number of
workers, times a factor that keeps the sum over all workers the same."""


# -- declarations of components -----------------------------------------------------------
class Field(NamedTuple):
    """An attribute (``part.attribute`` for one of a part's) and its rule."""

    attribute: str
    rule: Rule


Saved = dict[str, Field]
"""Fields by their names in the checkpoint."""


def saved(*names: str, merge: Rule = RESTART, **renamed: str) -> Saved:
    """Declare attributes saved under their own names, and others under new names."""
    attributes = {name: name for name in names} | renamed
    return {key: Field(attribute, merge) for key, attribute in attributes.items()}


class Stateful:
    """An object whose state is ``SAVED``."""

    SAVED: ClassVar[Saved]

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next segment depends on."""
        return state_of(self, self.SAVED)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`."""
        load_state(self, self.SAVED, state)

    def take_merged(self, part: MergedPart) -> None:
        """Restore this component's part of the state merged from another number of ranks."""
        take_merged(self, self.SAVED, part)


def state_of(owner: object, fields: Saved) -> dict[str, Any]:
    """Return the attributes' values, or their ``state_dict`` if they have one."""
    return {key: _state(attrgetter(each.attribute)(owner)) for key, each in fields.items()}


def _state(value: Any) -> Any:
    if isinstance(value, random.Random):
        version, words, rest = value.getstate()
        # Pickling the 625 numbers one by one would take most of the time of a small checkpoint.
        return version, torch.tensor(words), rest
    if isinstance(value, dict):
        return {key: _state(each) for key, each in value.items()}
    return value.state_dict() if hasattr(value, "state_dict") else value


def load_state(owner: object, fields: Saved, state: Mapping[str, Any]) -> None:
    """Restore the result of :func:`state_of`, tensors in place."""
    for key, each in fields.items():
        _load(owner, each.attribute, state[key])


def _load(owner: object, name: str, value: Any) -> None:
    path, _, attribute = name.rpartition(".")
    owner = attrgetter(path)(owner) if path else owner
    if not _load_in_place(getattr(owner, attribute), value):
        setattr(owner, attribute, copy(value))


def _load_in_place(present: Any, value: Any) -> bool:
    """Load into the attribute's present value; return False if it has to be replaced."""
    if isinstance(present, random.Random):
        version, words, rest = value
        if isinstance(words, Tensor):  # saved as a tensor to pickle faster
            words = tuple(words.tolist())
        present.setstate((version, words, rest))
    elif hasattr(present, "load_state_dict"):
        present.load_state_dict(value)
    elif isinstance(present, Tensor):
        present.copy_(value)
    elif (
        present
        and isinstance(present, dict)
        and isinstance(value, dict)
        and present.keys() == value.keys()
    ):
        return all([_load_in_place(present[key], value[key]) for key in present])
    else:
        return False
    return True


def merge(
    fields: Saved, merged: Mapping[str, Any] | None, new: Mapping[str, Any], count: int
) -> dict[str, Any]:
    """Merge one more rank's state into that of ``count - 1`` others, by the fields' rules.

    Raises:
        UserError: the states have no common value.
    """
    if merged is None:
        return dict(new)
    keys = [*merged, *(key for key in new if key not in merged)]
    puts = {key: fields[key].rule.put if key in fields else mean for key in keys}
    return {key: puts[key](merged.get(key), new.get(key), count, key) for key in keys}


def take_merged(owner: object, fields: Saved, part: MergedPart) -> None:
    """Restore all fields from their parts, by their rules."""
    for key, each in fields.items():
        each.rule.take(owner, each.attribute, part[key])


def numbers(state: Mapping[Any, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers in a state and in nested dicts, by their paths."""
    paths: dict[str, float] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            paths |= numbers(value, f"{prefix}{key}.")
        elif isinstance(value, int | float):
            paths[f"{prefix}{key}"] = value
    return paths
