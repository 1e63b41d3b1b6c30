"""Makes writes through ``parameter.data`` visible in a parameter's version."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

_watched: Counter[int] = Counter()
"""How many watchers each parameter has, by its id; a watcher holds the parameter."""


@cache
def _plain() -> Any:
    """Return torch's own descriptor of ``.data``."""
    return torch._C.TensorBase.__dict__["data"]


def raw_data(tensor: Tensor) -> Tensor:
    """Return ``tensor.data``, for writes that are not the script's."""
    data: Tensor = _plain().__get__(tensor)
    return data


class VisibleWrites:
    """While it is open, ``.data`` of some parameters shares their version counters.

    torch counts in-place writes to a parameter, and to tensors that share its memory, in its
    ``_version``. What ``.data`` returns has a counter of its own, so that such writes go unseen;
    ``detach()`` returns the same memory with the parameter's counter. Comparing the values instead
    would read the model twice in each step.

    Args:
        parameters: of the script's module.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        if not _watched:
            visible = property(_read, lambda tensor, value: _plain().__set__(tensor, value))
            torch.Tensor.data = visible  # type: ignore[assignment]
        _watched.update(map(id, self._parameters))

    def close(self) -> None:
        """Let ``.data`` be torch's again."""
        _watched.subtract(map(id, self._parameters))
        self._parameters.clear()
        for key in [key for key, watchers in _watched.items() if not watchers]:
            del _watched[key]
        if not _watched and "data" in torch.Tensor.__dict__:
            del torch.Tensor.data

    def __del__(self) -> None:
        """Forget the ids of a watcher that was not closed: other tensors may get them."""
        if self._parameters:
            self.close()


def _read(tensor: Tensor) -> Tensor:
    return tensor.detach() if id(tensor) in _watched else raw_data(tensor)
