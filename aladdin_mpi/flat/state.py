"""What a checkpoint holds of an object, and what of it continues with another number of ranks.

A component declares both in one table, ``SAVED``: its attributes, and for each a :class:`Rule`.
When a run is resumed with another number of ranks, rank 0 merges the workers' states one after
another into a :class:`MergedState`, which knows the keys of none of them. Each component of the
new ranks then takes its part of it.

All workers begin from the global model. Of what each had of its own (momentum, what compression
or rounding has held back) every new one gets the mean: as gradients are divided by the number
of workers, all of it together moves the global model as far as before.
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
    """The ranks that wrote a checkpoint, merged.

    Attributes:
        model: the global model, flat.
        worker: the workers' states less their models, merged.
        server: the servers' states, as the algorithm's servers have merged them.
        counts: the numbers in each worker's state by their paths, such as ``worker.samples``;
            None: it had failed.
        number: of the workers, where that of the counts is another.
        granted: samples granted to each worker with this number of workers; none: unknown.
        keeps_sums: gradients that servers had summed and not applied are still to be applied.
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
        """Their number."""
        return len(self.counts) if self.number is None else self.number

    @property
    def survivors(self) -> int:
        """The number of workers whose states have been merged."""
        return sum(each is not None for each in self.counts)

    def total(self, name: str) -> float:
        """The sum of a number over all workers."""
        return self.carried(name, 0, 1)

    def carried(self, name: str, worker: int, workers: int) -> float:
        """The number from which a new worker counts on, so that the sum over all stays the same."""
        return sum(each.get(name, 0) for each in self.counts[worker::workers] if each is not None)


@dataclass(frozen=True)
class MergedPart:
    """A component's part of the merged state, for one of the new workers.

    Attributes:
        worker: counts the new ``workers`` from 0.
        held_back: the factor for what compression has held back, see :data:`HELD_BACK`.
        path: the keys under which the component is found.
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
        """See :meth:`MergedState.carried`."""
        return int(self.merged.carried(".".join(self.path), self.worker, self.workers))


# -- rules ------------------------------------------------------------------------------
Put = Callable[[Any, Any, int, str], Any]
"""Merges the value of one more rank, ``put(merged, new, count, name)``, in place if it can.

``merged`` is of the ``count - 1`` ranks before; None: they have none.
"""
Take = Callable[[object, str, MergedPart], None]
"""Sets an attribute at a new rank: ``take(owner, attribute, part)``."""


class Rule(NamedTuple):
    """How a value continues when the run is resumed with another number of ranks."""

    put: Put
    take: Take


def by_leaf(leaf: Put) -> Put:
    """Merge dicts and lists of values by merging each value with ``leaf``.

    A worker that has made no step yet has fewer parts in a list; the longer list is taken.
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
    """The first rank's value."""
    return new if merged is None else merged


def smallest(merged: Any, new: Any, count: int, name: str = "") -> Any:
    """The smallest value of any rank."""
    return new if merged is None else min(merged, new)


def largest(merged: Any, new: Any, count: int, name: str = "") -> Any:
    """The largest value of any rank, for a tensor element by element."""
    if merged is None or new is None:
        return first(merged, new, count)
    return torch.maximum(merged, new) if isinstance(new, Tensor) else max(merged, new)


def equal(merged: Tensor | None, new: Tensor | None, count: int, name: str = "") -> Tensor:
    """The value of all ranks.

    Raises:
        UserError: they differ.
    """
    if merged is None or new is None or not torch.equal(merged, new):
        dtype = first(merged, new, count).dtype
        raise UserError(
            f"--allow-resize: the workers' states differ in {name!r}, of {dtype}, which cannot "
            "be averaged. Resume with the number of workers of the checkpoint."
        )
    return merged


def mean_of_leaves(merged: Any, new: Any, count: int, name: str = "") -> Any:
    """The mean of floating-point tensors; other tensors must be equal; else the first value."""
    if not (isinstance(merged, Tensor) or isinstance(new, Tensor)):
        return first(merged, new, count)
    if not first(merged, new, count).is_floating_point():
        return equal(merged, new, count, name)
    if merged is None:  # None stands for zeros
        return new.div_(count)
    if new is None:
        return merged.mul_(1 - 1 / count)
    return merged.add_(new.sub_(merged), alpha=1 / count)  # exact if all are the same


mean = by_leaf(mean_of_leaves)


def _by_component(owner: object, attribute: str, part: MergedPart) -> None:
    component = attrgetter(attribute)(owner)
    if hasattr(component, "take_merged"):
        component.take_merged(part)


def _assign(owner: object, attribute: str, part: MergedPart) -> None:
    _load(owner, attribute, part.value)


def _count_on(owner: object, attribute: str, part: MergedPart) -> None:
    setattr(owner, attribute, part.carried)


def _hold_back(owner: object, attribute: str, part: MergedPart) -> None:
    codec = attrgetter(attribute)(owner)
    codec.load_state_dict(part.value)
    codec.scale_held_back(part.held_back)


ANEW = Rule(mean, _by_component)
"""Each new rank begins anew, except for components, which have rules of their own."""
FIRST = Rule(first, _assign)
SMALLEST = Rule(smallest, _assign)
LARGEST = Rule(largest, _assign)
MEAN = Rule(mean, _assign)
TOTAL = Rule(first, _count_on)
"""A count, whose sum over all ranks stays the same."""
HELD_BACK = Rule(mean, _hold_back)
"""Of a codec: the mean of what it has held back; if gradients are not divided by the number of
workers, times a factor, so that the sum over all workers stays the same."""


# -- what a component declares ----------------------------------------------------------
class Field(NamedTuple):
    """An attribute, or ``part.attribute`` for one of a part's, and its rule."""

    attribute: str
    rule: Rule


Saved = dict[str, Field]
"""Fields by their names in the checkpoint."""


def saved(*names: str, merge: Rule = ANEW, **renamed: str) -> Saved:
    """Declare attributes saved under their own names, and others that are renamed."""
    attributes = {name: name for name in names} | renamed
    return {key: Field(attribute, merge) for key, attribute in attributes.items()}


class Stateful:
    """An object whose state is ``SAVED``."""

    SAVED: ClassVar[Saved]

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next segment depends on."""
        return state_of(self, self.SAVED)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state from :meth:`state_dict`."""
        load_state(self, self.SAVED, state)

    def take_merged(self, part: MergedPart) -> None:
        """Take up this component's part of the state of another number of ranks."""
        take_merged(self, self.SAVED, part)


def state_of(owner: object, fields: Saved) -> dict[str, Any]:
    """The attributes' values; of one that has a state of its own, that state."""
    return {key: _state(attrgetter(each.attribute)(owner)) for key, each in fields.items()}


def _state(value: Any) -> Any:
    if isinstance(value, random.Random):
        version, words, rest = value.getstate()
        # Pickled one by one the 625 numbers take most of the time of a small checkpoint.
        return version, torch.tensor(words), rest
    if isinstance(value, dict):
        return {key: _state(each) for key, each in value.items()}
    return value.state_dict() if hasattr(value, "state_dict") else value


def load_state(owner: object, fields: Saved, state: Mapping[str, Any]) -> None:
    """Take up what :func:`state_of` has returned, tensors in place."""
    for key, each in fields.items():
        _load(owner, each.attribute, state[key])


def _load(owner: object, name: str, value: Any) -> None:
    path, _, attribute = name.rpartition(".")
    owner = attrgetter(path)(owner) if path else owner
    if not _load_in_place(getattr(owner, attribute), value):
        setattr(owner, attribute, copy(value))


def _load_in_place(present: Any, value: Any) -> bool:
    """Load into what an attribute holds; False: it has to be replaced."""
    if isinstance(present, random.Random):
        version, words, rest = value
        if isinstance(words, Tensor):  # it was a tuple
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
    """Merge the state of one more rank into that of ``count - 1`` others, by its fields' rules.

    Raises:
        UserError: the states have no common value.
    """
    if merged is None:
        return dict(new)
    keys = [*merged, *(key for key in new if key not in merged)]
    puts = {key: fields[key].rule.put if key in fields else mean for key in keys}
    return {key: puts[key](merged.get(key), new.get(key), count, key) for key in keys}


def take_merged(owner: object, fields: Saved, part: MergedPart) -> None:
    """Take up the parts of all fields, by their rules."""
    for key, each in fields.items():
        each.rule.take(owner, each.attribute, part[key])


def numbers(state: Mapping[Any, Any], prefix: str = "") -> dict[str, float]:
    """The numbers in a state and the dicts in it, by their paths."""
    found: dict[str, float] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= numbers(value, f"{prefix}{key}.")
        elif isinstance(value, int | float):
            found[f"{prefix}{key}"] = value
    return found
