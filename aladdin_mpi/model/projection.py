"""Changes that a script makes to parameters after each step, such as clipping a critic's weights.

The optimizer is part of the algorithm, and the model that it steps may be at a server, in another
memory than the module's. A script therefore registers a function, and every rank applies it to each
parameter of the model that it steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from aladdin_mpi.errors import UserError
from aladdin_mpi.model.layout import Bucket
from aladdin_mpi.model.replica import places

Projection = Callable[[str, "Tensor"], None]
"""Called with a parameter's name and its values, which it changes in place."""


class _Place(NamedTuple):
    """A parameter in the flat vector."""

    name: str
    part: slice
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of values."""
        return self.part.stop - self.part.start

    def of(self, values: Tensor) -> Tensor:
        """Return ``values``, those of the parameter, in its shape."""
        return values.as_strided(self.shape, self.stride, values.storage_offset())


class Projections:
    """Applies a run's projections to flat vectors; does nothing if there are none.

    Args:
        functions: applied one after another.
        module: whose trainable parameters make up the flat vector.
    """

    def __init__(self, functions: Sequence[Projection], module: nn.Module) -> None:
        self._functions = tuple(functions)
        names = {parameter: name for name, parameter in module.named_parameters()}
        self._places = [
            _Place(names[parameter], part, tuple(parameter.shape), parameter.stride())
            for parameter, part in (places(module).items() if functions else ())
        ]
        self._in_bucket: dict[Bucket, list[_Place]] = {}

    def __bool__(self) -> bool:
        return bool(self._functions)

    def apply(self, vector: Tensor) -> None:
        """Apply them to a whole flat vector, in place."""
        for place in self._places:
            self._call(place, place.of(vector[place.part]))

    def apply_to_bucket(self, bucket: Bucket, values: Tensor) -> None:
        """Apply them to the parameters of a bucket, which has whole ones."""
        if bucket not in self._in_bucket:
            self._in_bucket[bucket] = [
                place for place in self._places if bucket.start <= place.part.start < bucket.stop
            ]
        for place in self._in_bucket[bucket]:
            start = place.part.start - bucket.start
            self._call(place, place.of(values[start : start + place.numel]))

    def _call(self, place: _Place, values: Tensor) -> None:
        with torch.no_grad():
            for function in self._functions:
                if function(place.name, values) is not None:
                    raise UserError(
                        "run.project() requires a function that changes the values in place and "
                        f"returns nothing, and {getattr(function, '__name__', function)} returned "
                        f"something for {place.name}. Use in-place methods such as clamp_()."
                    )
