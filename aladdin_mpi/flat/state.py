"""What a checkpoint holds of an object, as a declared list of its attributes."""

from __future__ import annotations

import random
from collections.abc import Mapping
from copy import copy
from operator import attrgetter
from typing import Any, ClassVar

import torch

Saved = dict[str, str]
"""Attributes by their names in the checkpoint; ``part.attribute`` is one of a part's."""


def saved(*names: str, **renamed: str) -> Saved:
    """Attributes that go by their own names, and those that go by others."""
    return {name: name for name in names} | renamed


class Stateful:
    """An object whose state is ``SAVED``."""

    SAVED: ClassVar[Saved]

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next segment depends on."""
        return state_of(self, self.SAVED)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state from :meth:`state_dict`."""
        load_state(self, self.SAVED, state)


def state_of(owner: object, attributes: Saved) -> dict[str, Any]:
    """The attributes' values; of one that has a state of its own, that state."""
    return {key: _state(attrgetter(name)(owner)) for key, name in attributes.items()}


def _state(value: Any) -> Any:
    if isinstance(value, random.Random):
        version, words, rest = value.getstate()
        # Pickled one by one the 625 numbers take most of the time of a small checkpoint.
        return version, torch.tensor(words), rest
    return value.state_dict() if hasattr(value, "state_dict") else value


def load_state(owner: object, attributes: Saved, state: Mapping[str, Any]) -> None:
    """Take up what :func:`state_of` has returned, tensors in place."""
    for key, name in attributes.items():
        path, _, attribute = name.rpartition(".")
        _load(attrgetter(path)(owner) if path else owner, attribute, state[key])


def _load(owner: object, attribute: str, value: Any) -> None:
    present = getattr(owner, attribute)
    if isinstance(present, random.Random):
        version, words, rest = value
        if isinstance(words, torch.Tensor):  # it was a tuple
            words = tuple(words.tolist())
        present.setstate((version, words, rest))
    elif hasattr(present, "load_state_dict"):
        present.load_state_dict(value)
    elif isinstance(present, torch.Tensor):
        present.copy_(value)
    else:
        setattr(owner, attribute, copy(value))
