"""Parameters whose memory is not the flat vector's: those of another dtype, and shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.shards import local

_watched: Counter[int] = Counter()
"""Number of watchers of each parameter, by its id; a watcher holds the parameter."""


_DATA: Any = torch._C.TensorBase.__dict__["data"]
"""Torch's own descriptor of ``.data``."""


def raw_data(tensor: Tensor) -> Tensor:
    """Return ``tensor.data``, for writes that are not the training loop's."""
    data: Tensor = _DATA.__get__(tensor)
    return data


class VisibleWrites:
    """Context in which ``.data`` of some parameters shares their version counters.

    torch counts in-place writes to a parameter, and to tensors that share its memory, in its
    ``_version``. ``.data`` returns a tensor with its own counter, so such writes are not detected;
    ``detach()`` returns the same memory with the parameter's counter. Comparing values instead
    would read the model twice in each step.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        if not _watched:
            visible = property(_read, lambda tensor, value: _DATA.__set__(tensor, value))
            torch.Tensor.data = visible  # type: ignore[assignment]
        _watched.update(map(id, self._parameters))

    def close(self) -> None:
        """Restore torch's ``.data``."""
        _watched.subtract(map(id, self._parameters))
        self._parameters.clear()
        for key in [key for key, watchers in _watched.items() if not watchers]:
            del _watched[key]
        if not _watched and "data" in torch.Tensor.__dict__:
            del torch.Tensor.data

    def __del__(self) -> None:
        """Remove the ids of a watcher that was not closed, as other tensors may get them."""
        if self._parameters:
            self.close()


def _read(tensor: Tensor) -> Tensor:
    return tensor.detach() if id(tensor) in _watched else raw_data(tensor)


def common_dtype(parameters: Iterable[nn.Parameter]) -> torch.dtype:
    """Return the dtype that can hold all values: float32 for bfloat16 and float32.

    Raises:
        UserError: torch cannot combine two dtypes (as those of 8 bits), or one is not real.
    """
    widest, *others = {parameter.dtype for parameter in parameters}
    for dtype in others:
        try:
            widest = torch.promote_types(widest, dtype)
        except RuntimeError:
            raise UserError(
                "model: expected trainable parameters of dtypes that torch combines, got "
                f"{widest} and {dtype}; convert them to one, or freeze some"
            ) from None
    if not widest.is_floating_point:
        raise UserError(
            f"model: expected trainable parameters of real numbers, got {widest}; freeze the "
            "others, or split them into real and imaginary parts"
        )
    return widest


class SeparateParameters(dict[nn.Parameter, Tensor]):
    """Map from each parameter with memory of its own to its part of the flat vector, in its shape.

    Autograd requires a gradient in the dtype of its parameter, and FSDP has its own memory for
    shards. These gradients stay in ``.grad`` and are copied into the flat vector; the optimizer
    steps on the flat vector, and the parameters are copied from it before each step.
    """

    def refresh(self) -> None:
        """Copy the parameters from the flat vector."""
        if self:
            # As .data, so that versions distinguish these writes from the training loop's.
            held = [raw_data(local(parameter)) for parameter in self]
            torch._foreach_copy_(held, list(self.values()))
