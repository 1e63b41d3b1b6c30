"""A model as one flat vector of parameters and one of gradients.

The module's parameters and their ``.grad`` become views into the flat vectors, so that gradients
are computed in the send buffers, and one operation blends in a received model.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from aladdin_mpi.accelerator import is_accelerator
from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.dtypes import SeparateParameters, common_dtype, raw_data
from aladdin_mpi.flat.gradients import BoundGradients, BucketWatch
from aladdin_mpi.flat.layout import Bucket, Layout
from aladdin_mpi.flat.parts import WHOLE, Outside
from aladdin_mpi.flat.shards import is_sharded, local, reshard
from aladdin_mpi.flat.vectors import sizes as sizes_alone


@dataclass(frozen=True)
class DenseLayer:
    """An ``nn.Linear`` with a trained weight, ``outputs`` x ``inputs``, that is not shared.

    ``weight`` and ``bias`` are slices of the flat vector; ``bias`` is None if no bias is
    trained.
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
        shapes: shapes of the parameters.
        layers: number of values of each layer. A layer is one module's own parameters, such as
            its weight and its bias.
        dense: the fully connected layers.
        orders: dimensions of each parameter in memory order, slowest first; empty without
            memory.
    """

    shapes: tuple[tuple[int, ...], ...]
    layers: tuple[int, ...]
    dense: tuple[DenseLayer, ...] = ()
    orders: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of values of each parameter."""
        return tuple(map(prod, self.shapes))

    def describe(self) -> list[str]:
        """Return each parameter's shape, and its memory order if not the default."""
        orders = self.orders or [() for _ in self.shapes]
        return [
            f"{list(shape)}{_in_words(order)}"
            for shape, order in zip(self.shapes, orders, strict=True)
        ]


def outline(module: nn.Module) -> Outline:
    """Return the outline of ``module``, which may be on the device "meta"."""
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


def _order(parameter: Tensor) -> tuple[int, ...]:
    """Return the dimensions of size > 1, in order of decreasing stride."""
    places = [place for place, size in enumerate(parameter.shape) if size > 1]
    return tuple(sorted(places, key=lambda place: -parameter.stride()[place]))


def _in_words(order: tuple[int, ...]) -> str:
    if list(order) == sorted(order):
        return ""
    return " channels last" if order == (0, 2, 3, 1) else f" with dimensions in order {list(order)}"


def describe_state(module: nn.Module) -> list[str]:
    """Return name, dtype and shape of each parameter and buffer of ``module``, in its order.

    Equal lists mean that a state of one module, which has no names, fits the other.
    """
    parameters = [
        f"{name} {_outlined(p)}" if p.requires_grad else f"{name} {_outlined(p)} frozen"
        for name, p in module.named_parameters()
    ]
    buffers = [f"{name} {_outlined(buffer)}" for name, buffer in module.named_buffers()]
    return parameters + buffers


def _outlined(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)}{_in_words(_order(tensor))}"


def places(module: nn.Module) -> dict[nn.Parameter, slice]:
    """Return the slice of the flat vector of each trainable parameter."""
    parameters = [p for p in module.parameters() if p.requires_grad][::-1]
    stops = accumulate(parameter.numel() for parameter in parameters)
    return {p: slice(stop - p.numel(), stop) for p, stop in zip(parameters, stops, strict=True)}


def _dense_layers(module: nn.Module) -> tuple[DenseLayer, ...]:
    """Return the dense layers in flat order, without those that share a parameter."""
    at = places(module)
    owners = Counter(p for part in module.modules() for p in part.parameters(recurse=False))
    layers = []
    for name, part in module.named_modules():
        own = list(part.parameters(recurse=False))
        if type(part) is not torch.nn.Linear or not isinstance(part.weight, torch.nn.Parameter):
            continue
        if part.weight not in at or not part.weight.is_contiguous():
            continue
        if all(owners[parameter] == 1 for parameter in own):
            bias = at.get(part.bias) if part.bias is not None else None
            layer = DenseLayer(name, part.out_features, part.in_features, at[part.weight], bias)
            layers.append(layer)
    return tuple(layers[::-1])


class FlatModel:
    """A module's trainable parameters as a flat vector, with the sizes of an :class:`Outline`.

    Attributes:
        outside: the parts that each batch steps one after another, by the parameters outside them.
        turn: number of the part whose gradient is computed.
    """

    def __init__(self, outline: Outline, parameters: Tensor, outside: Outside) -> None:
        self.parameters = parameters
        self.shapes, self.sizes = outline.shapes, outline.sizes
        self.numel = sum(self.sizes)
        self.layers, self.dense = outline.layers, outline.dense
        self.describe = outline.describe
        self.outside = outside
        self.turn = 0

    def new_vector(self) -> Tensor:
        """Return a zeroed flat vector like the parameters."""
        return torch.zeros_like(self.parameters)


class Replica(FlatModel):
    """A module's trainable parameters as a flat vector, last layer first.

    The last layer comes first because backward completes it first: bucket 0 can then
    be sent first. Frozen parameters are excluded, tied ones are included once. If dtypes
    differ, the vector has the widest, and parameters of the others are copies. The module
    must be on its device already; its parameters' storage is replaced.

    If the parameters are divided among the ranks of an island, ``parameters`` has this rank's
    parts, and everything else describes the whole model.

    Raises:
        UserError: no trainable parameter, several devices, or complex numbers.
    """

    def __init__(self, module: nn.Module, outside: Outside = WHOLE) -> None:
        self.module: nn.Module | None = module
        self._parameters = [p for p in module.parameters() if p.requires_grad][::-1]
        self.is_sharded = is_sharded(module)
        if self.is_sharded:
            reshard(module)
        self._local = list(map(local, self._parameters))
        """The parts of the parameters that this rank has."""
        device, dtype = self._device(), common_dtype(self._parameters)
        numel = sum(part.numel() for part in self._local)
        if self.is_sharded and not numel:
            raise UserError(
                "model: this rank has no part of it, because each parameter has fewer rows than "
                "its island has ranks; use smaller islands"
            )
        if not numel:
            raise UserError(
                "model: expected trainable parameters with values, got none with any; pass a "
                "model whose parameters are not empty"
            )
        vector = torch.empty(numel, dtype=dtype, device=device)
        super().__init__(outline(module), vector, outside)
        self.separate = SeparateParameters()
        self.gradients = BoundGradients(self._parameters, self.separate)
        self._buffer_names = [name for name, _ in module.named_buffers()]
        self._buffers: list[Tensor] | None = None
        self._kept: deque[list[Tensor]] = deque()
        self._attached: dict[nn.Parameter, Tensor] | None = None
        """The parameters' memory while the module has copies of them."""
        for number, view in enumerate(self._cut(self.parameters)):
            parameter, part = self._parameters[number], self._local[number]
            view.copy_(part.detach())
            if parameter is part and parameter.dtype == dtype:
                parameter.data = view
            else:
                self.separate[parameter] = view

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
        """Set the model from another flat vector, on any device."""
        self.parameters.copy_(vector)
        self.refresh()

    def refresh(self) -> None:
        """Copy the parameters with memory of their own from the vector."""
        if self.is_sharded:  # a pass without backward has left gathered parameters
            assert self.module is not None
            reshard(self.module)
        self.separate.refresh()

    def _cut(self, vector: Tensor) -> Iterator[Tensor]:
        """Yield views of ``vector`` with the shapes and strides of the parameters' parts."""
        pieces = vector.split([part.numel() for part in self._local])
        for part, piece in zip(self._local, pieces, strict=True):
            yield piece.as_strided(part.shape, part.stride(), piece.storage_offset())

    def keep_buffers(self) -> None:
        """Save the module's floating-point buffers, such as batch norm's statistics."""
        if self._buffers is None:
            assert self.module is not None
            self._buffers = [b for b in self.module.buffers() if b.is_floating_point()]
            # The result of a step on a device is known only after the next step has started.
            for _ in range(2 if is_accelerator(self.parameters.device) else 1):
                self._kept.append([b.clone() for b in self._buffers])
        self._kept.rotate(-1)
        if self._buffers:
            torch._foreach_copy_(self._kept[-1], self._buffers)

    def restore_buffers(self, steps: int = 0) -> None:
        """Restore the buffers of the last call of :meth:`keep_buffers`.

        With ``steps``, of the call ``steps`` calls earlier; what was saved since is discarded.
        """
        if not self._buffers:
            return
        for later in range(len(self._kept) - steps, len(self._kept)):
            torch._foreach_copy_(self._kept[later], self._kept[-1 - steps])
        torch._foreach_copy_(self._buffers, self._kept[-1 - steps])

    def bind_gradients(self, vector: Tensor) -> None:
        """Direct the next gradient into ``vector`` and refresh parameters with own memory."""
        if self.separate:
            self.refresh()
        self.gradients.bind(vector, self._cut)

    def end_backward(self, is_skipped: bool = False) -> None:
        """End backward (or a step without it): complete and check the gradients of this turn."""
        self.gradients.end_backward(is_skipped, self.outside[self.turn])

    @property
    def is_local(self) -> bool:
        """Whether the module computes inside :meth:`local`."""
        return self.gradients.are_local

    @contextmanager
    def local(self) -> Iterator[None]:
        """Leave the gradients of backward to the training loop, and drop them at the end.

        From here to :meth:`attach`, the module has copies of its parameters, which the training
        loop may change. The flat vector, which may be stepped or sent at any time, is unaffected.
        """
        if self._attached is None:
            self._attached = {p: raw_data(p) for p in self._parameters if p not in self.separate}
            for parameter, values in self._attached.items():
                parameter.data = values.clone()
        kept, self.gradients.are_local = self.gradients.set_aside(), True
        try:
            yield
        finally:
            self.gradients.are_local = False
            self.gradients.put_back(kept)

    def attach(self) -> None:
        """Drop the copies of parameters that :meth:`local` has made, if any."""
        if self._attached is not None:
            for parameter, values in self._attached.items():
                parameter.data = values
            self._attached = None
            self.refresh()

    def watch(self, layout: Layout, at_once: bool = True) -> BucketWatch:
        """Return a watch that reports buckets during backward, in order, as they are completed.

        ``at_once``: buckets are used immediately, so :meth:`end_backward` refuses gradients that
        are changed later. With parts, buckets are reported after backward, which may pass through
        several of them.
        """
        if len(self.outside) > 1:
            return BucketWatch(layout, self.gradients, ())
        if at_once:
            self.gradients.notice_changes()
        return BucketWatch(layout, self.gradients, self._parameters)

    @property
    def unused(self) -> Set[int]:
        """Numbers, in flat order, of the parameters that the current gradient does not reach."""
        return self.gradients.unused

    def use_none(self) -> None:
        """Mark all parameters as unused by the current gradient, for a step without a batch."""
        self.gradients.unused = set(range(len(self._parameters)))

    def buffers(self) -> list[Tensor]:
        """Return the state outside the flat vector: frozen parameters and the module's buffers."""
        assert self.module is not None
        return self.state_outside(self.module)

    def state_outside(self, module: nn.Module) -> list[Tensor]:
        """Return the same as :meth:`buffers`, of a module with the same structure."""
        frozen = [local(p.detach()) for p in module.parameters() if not p.requires_grad]
        return frozen + self.named_buffers(module)

    def named_buffers(self, module: nn.Module) -> list[Tensor]:
        """Return the module's buffers without those that were registered during training.

        Such buffers, as of a cache, differ among the ranks: servers make no forward pass.
        """
        return [module.get_buffer(name) for name in self._buffer_names]


def copy_tensors(source: Iterable[Tensor], dest: Iterable[Tensor]) -> None:
    """Copy values, and the shapes of those whose shape the training has changed."""
    for mine, theirs in zip(dest, source, strict=True):
        if mine.shape != theirs.shape:
            mine.resize_(theirs.shape)
        mine.copy_(theirs)


class PhantomReplica(FlatModel):
    """Only the sizes of a model, for simulated computation.

    Its vectors are ``meta`` tensors, which store nothing; the wire's memory belongs to
    :class:`~aladdin_mpi.codec.base.DenseWire`. Without ``sizes`` it is one matrix.
    """

    module = None
    is_sharded = False

    def __init__(self, numel: int, sizes: Outline | None = None, outside: Outside = WHOLE) -> None:
        outline = sizes or Outline(((1, numel),), (numel,))
        super().__init__(outline, sizes_alone(numel, torch.float32), outside)

    unused: Set[int] = frozenset()

    def new_vector(self) -> Tensor:
        """Return the same vector again, as it has no contents."""
        return self.parameters

    def keep_buffers(self, *_: object) -> None:
        """Do nothing: no values exist."""

    restore_buffers = bind_gradients = use_none = refresh = keep_buffers

    def buffers(self) -> list[Tensor]:
        """Return an empty list."""
        return []


Projection = Callable[[str, "Tensor"], None]
"""Function of a parameter's name and its values, which it changes in place."""


class _Place(NamedTuple):
    """A parameter in the flat vector."""

    name: str
    part: slice
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Projections:
    """A run's projections, applied to flat vectors; a no-op without any.

    Args:
        functions: applied in this order.
        module: module whose trainable parameters form the flat vector.
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

    def apply(self, vector: Tensor, device: torch.device | None = None) -> None:
        """Apply the projections to a whole flat vector, in place.

        The functions receive values on ``device``, by default the vector's. A script's functions
        expect the rank's, on which they have, for example, their masks.
        """
        if not self._places:
            return
        values = vector.to(device or vector.device)
        for place in self._places:
            self._call(place, values[place.part])
        if values is not vector:
            vector.copy_(values)

    def apply_to_bucket(self, bucket: Bucket, values: Tensor) -> None:
        """Apply the projections to the parameters of a bucket, which are whole."""
        if bucket not in self._in_bucket:
            self._in_bucket[bucket] = [
                place for place in self._places if bucket.start <= place.part.start < bucket.stop
            ]
        for place in self._in_bucket[bucket]:
            self._call(place, values[place.part.start - bucket.start :])

    def _call(self, place: _Place, values: Tensor) -> None:
        """Apply the projections to the parameter at the start of ``values``."""
        values = values.as_strided(place.shape, place.stride, values.storage_offset())
        with torch.no_grad():
            for function in self._functions:
                if function(place.name, values) is not None:
                    raise UserError(
                        "run.project() requires a function that changes the values in place and "
                        f"returns nothing; {getattr(function, '__name__', function)} returned "
                        f"something for {place.name}. Use in-place methods such as clamp_()."
                    )
