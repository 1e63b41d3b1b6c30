"""A model as one flat vector of parameters and one of gradients.

The module's parameters and their ``.grad`` become views into the flat vectors, so
that gradients lie where messages are sent from, and a received model is blended
in by one operation.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from aladdin_mpi.accelerator import is_accelerator
from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.dtypes import OtherDtypes, common_dtype
from aladdin_mpi.flat.gradients import BoundGradients, BucketWatch
from aladdin_mpi.flat.layout import Bucket, Layout
from aladdin_mpi.flat.vectors import sizes as sizes_alone


@dataclass(frozen=True)
class DenseLayer:
    """An ``nn.Linear`` whose weight, ``outputs`` x ``inputs``, is trained and nobody else's.

    ``weight`` and ``bias`` say where they lie in the flat vector; ``bias`` is None where
    there is none to be trained.
    """

    name: str
    outputs: int
    inputs: int
    weight: slice
    bias: slice | None


@dataclass(frozen=True)
class Outline:
    """The sizes of a module's trainable parameters, in flat order: last layer first.

    Attributes:
        shapes: of the parameters.
        layers: numbers of values of the layers. A layer is what one module holds itself, such as
            its weight and its bias.
        dense: the fully connected layers.
        orders: the parameters' dimensions as memory has them, the slowest first; none without
            memory.
    """

    shapes: tuple[tuple[int, ...], ...]
    layers: tuple[int, ...]
    dense: tuple[DenseLayer, ...] = ()
    orders: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of values of the parameters."""
        return tuple(map(prod, self.shapes))

    def describe(self) -> list[str]:
        """Return each parameter's shape, and how it lies in memory if not in order."""
        orders = self.orders or [() for _ in self.shapes]
        return [
            f"{list(shape)}{_in_words(order)}"
            for shape, order in zip(self.shapes, orders, strict=True)
        ]


def outline(module: nn.Module) -> Outline:
    """The outline of ``module``, which may be on the device "meta"."""
    shapes: list[tuple[int, ...]] = []
    layers: list[int] = []
    seen: set[nn.Parameter] = set()
    for part in module.modules():
        own = [p for p in part.parameters(recurse=False) if p.requires_grad and p not in seen]
        seen.update(own)
        shapes += [tuple(p.shape) for p in own]
        if own:
            layers.append(sum(p.numel() for p in own))
    orders = tuple(map(_order, places(module)))
    return Outline(tuple(shapes[::-1]), tuple(layers[::-1]), _dense_layers(module), orders)


def _order(parameter: nn.Parameter) -> tuple[int, ...]:
    """Its dimensions, that with the largest stride first; those of size 1 have no place."""
    places = [place for place, size in enumerate(parameter.shape) if size > 1]
    return tuple(sorted(places, key=lambda place: -parameter.stride()[place]))


def _in_words(order: tuple[int, ...]) -> str:
    if list(order) == sorted(order):
        return ""
    return " channels last" if order == (0, 2, 3, 1) else f" with dimensions in order {list(order)}"


def places(module: nn.Module) -> dict[nn.Parameter, slice]:
    """Where each trainable parameter lies in the flat vector."""
    parameters = [p for p in module.parameters() if p.requires_grad][::-1]
    stops = accumulate(parameter.numel() for parameter in parameters)
    return {p: slice(stop - p.numel(), stop) for p, stop in zip(parameters, stops, strict=True)}


def _dense_layers(module: nn.Module) -> tuple[DenseLayer, ...]:
    """In flat order; one of which a parameter is tied to another layer's is left out."""
    at = places(module)
    owners = Counter(p for part in module.modules() for p in part.parameters(recurse=False))
    found = []
    for name, part in module.named_modules():
        own = list(part.parameters(recurse=False))
        if type(part) is not torch.nn.Linear or not isinstance(part.weight, torch.nn.Parameter):
            continue
        if part.weight not in at or not part.weight.is_contiguous():
            continue
        if all(owners[parameter] == 1 for parameter in own):
            bias = at.get(part.bias) if part.bias is not None else None
            layer = DenseLayer(name, part.out_features, part.in_features, at[part.weight], bias)
            found.append(layer)
    return tuple(found[::-1])


class _Flat:
    """A module's trainable parameters as a flat vector, and their sizes as in :class:`Outline`."""

    def __init__(self, outline: Outline, parameters: Tensor) -> None:
        self.parameters = parameters
        self.numel = parameters.numel()
        self.shapes, self.sizes = outline.shapes, outline.sizes
        self.layers, self.dense = outline.layers, outline.dense
        self.describe = outline.describe

    def new_vector(self) -> Tensor:
        """Return a zeroed flat vector like the parameters."""
        return torch.zeros_like(self.parameters)


class Replica(_Flat):
    """A module's trainable parameters as a flat vector, last layer first.

    The last layer comes first because backward completes it first: bucket 0 is
    then the first that can leave. Frozen parameters stay outside, tied ones are
    in once. Where dtypes differ the vector has the widest, and the others are copies.
    The module is on its device already; its parameters' storage is replaced.

    Raises:
        UserError: no trainable parameter, several devices, or complex numbers.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module: nn.Module | None = module
        self._parameters = [p for p in module.parameters() if p.requires_grad][::-1]
        device, dtype = self._device(), common_dtype(self._parameters)
        numel = sum(p.numel() for p in self._parameters)
        if not numel:
            raise UserError(
                "model: expected trainable parameters with values, got none with any; pass a "
                "model whose parameters are not empty"
            )
        super().__init__(outline(module), torch.empty(numel, dtype=dtype, device=device))
        self.others = OtherDtypes()
        self.gradients = BoundGradients(self._parameters, self.others)
        self._buffers: list[Tensor] | None = None
        self._kept: deque[list[Tensor]] = deque()
        for parameter, view in zip(self._parameters, self._cut(self.parameters), strict=True):
            view.copy_(parameter.detach())
            if parameter.dtype == dtype:
                parameter.data = view
            else:
                self.others[parameter] = view

    def _device(self) -> torch.device:
        if not self._parameters:
            raise UserError(
                "model: expected at least one parameter that requires a gradient, got none; "
                "unfreeze some"
            )
        devices = {p.device for p in self._parameters}
        if len(devices) > 1:
            raise UserError(
                "model: expected all trainable parameters on one device, got "
                f"{', '.join(sorted(map(str, devices)))}; use model.to(device)"
            )
        return devices.pop()

    def set(self, vector: Tensor) -> None:
        """Make the model that of another flat vector, on any device."""
        self.parameters.copy_(vector)
        self.others.refresh()

    def _cut(self, vector: Tensor) -> Iterator[Tensor]:
        """Views of ``vector`` shaped, and strided, as the parameters."""
        pieces = vector.split([parameter.numel() for parameter in self._parameters])
        for parameter, piece in zip(self._parameters, pieces, strict=True):
            yield piece.as_strided(parameter.shape, parameter.stride(), piece.storage_offset())

    def keep_buffers(self) -> None:
        """Remember the module's buffers of real numbers, such as batch norm's statistics."""
        if self._buffers is None:
            assert self.module is not None
            self._buffers = [b for b in self.module.buffers() if b.is_floating_point()]
            # What a device has made of a step is known when the next one has begun.
            for _ in range(2 if is_accelerator(self.parameters.device) else 1):
                self._kept.append([b.clone() for b in self._buffers])
        self._kept.rotate(-1)
        if self._buffers:
            torch._foreach_copy_(self._kept[-1], self._buffers)

    def restore_buffers(self, steps: int = 0) -> None:
        """Make them what they were at the last call of :meth:`keep_buffers`.

        With ``steps``, at the call so many before; what has been kept since is dropped.
        """
        if not self._buffers:
            return
        for later in range(len(self._kept) - steps, len(self._kept)):
            torch._foreach_copy_(self._kept[later], self._kept[-1 - steps])
        torch._foreach_copy_(self._buffers, self._kept[-1 - steps])

    def bind_gradients(self, vector: Tensor) -> None:
        """Let the next gradient go into ``vector``: see :meth:`BoundGradients.bind`."""
        if self.others:
            self.others.refresh()
        self.gradients.bind(vector, self._cut)

    def end_backward(self, is_skipped: bool = False) -> None:
        """Backward is over, or there was none: see :meth:`BoundGradients.end_backward`."""
        self.gradients.end_backward(is_skipped)

    def watch(self, layout: Layout, at_once: bool = True) -> BucketWatch:
        """Return a watch that reports buckets during backward, in order, as they are completed.

        ``at_once``: they are used then; :meth:`end_backward` refuses gradients that are changed
        later.
        """
        if at_once:
            self.gradients.notice_changes()
        return BucketWatch(layout, self.gradients, self._parameters)

    @property
    def unused(self) -> Set[int]:
        """Numbers, in flat order, of the parameters that the present gradient does not reach."""
        return self.gradients.unused

    def use_none(self) -> None:
        """Let the present gradient reach no parameter: there is no batch."""
        self.gradients.unused = set(range(len(self._parameters)))

    def buffers(self) -> list[Tensor]:
        """What the flat vector leaves out: frozen parameters and the module's buffers."""
        assert self.module is not None
        frozen = [p.detach() for p in self.module.parameters() if not p.requires_grad]
        return frozen + list(self.module.buffers())


class PhantomReplica(_Flat):
    """Only the sizes of a model, for computing that is timed and not done.

    Its vectors are ``meta`` tensors, which store nothing; what the wire needs of real memory
    belongs to :class:`~aladdin_mpi.codec.base.DenseWire`. Without ``sizes`` it is one matrix.
    """

    module = None

    def __init__(self, numel: int, sizes: Outline | None = None) -> None:
        outline = sizes or Outline(((1, numel),), (numel,))
        super().__init__(outline, sizes_alone(numel, torch.float32))

    unused: Set[int] = frozenset()

    def new_vector(self) -> Tensor:
        """Return the same vector again: there is nothing in it."""
        return self.parameters

    def keep_buffers(self, *_: object) -> None:
        """Do nothing: there are no values."""

    restore_buffers = bind_gradients = use_none = keep_buffers

    def buffers(self) -> list[Tensor]:
        """Return an empty list."""
        return []


Projection = Callable[[str, "Tensor"], None]
"""Called with a parameter's name and its values, which it changes in place."""


class _Place(NamedTuple):
    """A parameter in the flat vector."""

    name: str
    part: slice
    shape: tuple[int, ...]
    stride: tuple[int, ...]


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
            self._call(place, vector[place.part])

    def apply_to_bucket(self, bucket: Bucket, values: Tensor) -> None:
        """Apply them to the parameters of a bucket, which has whole ones."""
        if bucket not in self._in_bucket:
            self._in_bucket[bucket] = [
                place for place in self._places if bucket.start <= place.part.start < bucket.stop
            ]
        for place in self._in_bucket[bucket]:
            self._call(place, values[place.part.start - bucket.start :])

    def _call(self, place: _Place, values: Tensor) -> None:
        """Apply them to the parameter that ``values`` begins with."""
        values = values.as_strided(place.shape, place.stride, values.storage_offset())
        with torch.no_grad():
            for function in self._functions:
                if function(place.name, values) is not None:
                    raise UserError(
                        "run.project() requires a function that changes the values in place and "
                        f"returns nothing; {getattr(function, '__name__', function)} returned "
                        f"something for {place.name}. Use in-place methods such as clamp_()."
                    )
