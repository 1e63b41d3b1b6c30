"""A model as one flat vector of parameters and one of gradients.

The module's parameters and their ``.grad`` become views into the flat vectors, so
that gradients lie where messages are sent from, and a received model is blended
in by one operation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from aladdin_mpi.errors import UserError
from aladdin_mpi.layout import Layout
from aladdin_mpi.other_dtypes import OtherDtypes, common_dtype, convert_gradient

OnBucket = Callable[[int], None]
"""Called with the number of a bucket when all of its gradients are there."""


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

    ``shapes`` are the parameters', ``layers`` the numbers of values of the layers. A
    layer is what one module holds itself, such as its weight and its bias. ``dense``
    are the fully connected ones.
    """

    shapes: tuple[tuple[int, ...], ...]
    layers: tuple[int, ...]
    dense: tuple[DenseLayer, ...] = ()


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
    return Outline(tuple(shapes[::-1]), tuple(layers[::-1]), _dense_layers(module))


def places(module: nn.Module) -> dict[nn.Parameter, slice]:
    """Where each trainable parameter lies in the flat vector."""
    found: dict[nn.Parameter, slice] = {}
    start = 0
    for parameter in [p for p in module.parameters() if p.requires_grad][::-1]:
        found[parameter] = slice(start, start + parameter.numel())
        start += parameter.numel()
    return found


def _dense_layers(module: nn.Module) -> tuple[DenseLayer, ...]:
    """In flat order; one of which a parameter is tied to another layer's is left out."""
    at = places(module)
    owners = Counter(p for part in module.modules() for p in part.parameters(recurse=False))
    found = []
    for name, part in module.named_modules():
        own = list(part.parameters(recurse=False))
        if type(part) is not nn.Linear or not isinstance(part.weight, nn.Parameter):
            continue
        if part.weight not in at or not part.weight.is_contiguous():
            continue
        if all(owners[parameter] == 1 for parameter in own):
            bias = at.get(part.bias) if part.bias is not None else None
            layer = DenseLayer(name, part.out_features, part.in_features, at[part.weight], bias)
            found.append(layer)
    return tuple(found[::-1])


class _Flat:
    """A module's trainable parameters as a flat vector, and their sizes."""

    parameters: Tensor
    _outline: Outline

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the parameters, in flat order."""
        return list(self._outline.shapes)

    @property
    def layers(self) -> list[int]:
        """Numbers of values of the layers, in flat order."""
        return list(self._outline.layers)

    @property
    def dense(self) -> tuple[DenseLayer, ...]:
        """The fully connected layers, in flat order."""
        return self._outline.dense

    def new_vector(self) -> Tensor:
        """A zeroed flat vector like the parameters."""
        return torch.zeros_like(self.parameters)


class Replica(_Flat):
    """A module's trainable parameters as a flat vector, last layer first.

    The last layer comes first because backward completes it first: bucket 0 is
    then the first that can leave. Frozen parameters stay outside, tied ones are
    in once. Where dtypes differ the vector has the widest, and the others are copies.

    Args:
        module: on its device already; its parameters' storage is replaced.

    Raises:
        UserError: no trainable parameter, several devices, or complex numbers.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module: nn.Module | None = module
        self._parameters = [p for p in module.parameters() if p.requires_grad][::-1]
        device, dtype = self._device(), common_dtype(self._parameters)
        self._outline = outline(module)
        self.numel = sum(p.numel() for p in self._parameters)
        self.parameters = torch.empty(self.numel, dtype=dtype, device=device)
        self.others = OtherDtypes()
        self._views: dict[int, dict[nn.Parameter, Tensor]] = {}
        self._bound: dict[nn.Parameter, Tensor] = {}
        self._missing: set[nn.Parameter] = set()
        self._takes = False
        self._versions: dict[nn.Parameter, int] | None = None
        self._kept: tuple[list[Tensor], list[Tensor]] | None = None
        for parameter, view in zip(self._parameters, self._cut(self.parameters), strict=True):
            view.copy_(parameter.detach())
            if parameter.dtype == dtype:
                parameter.data = view
            else:
                self.others.add(parameter, view)

    def _device(self) -> torch.device:
        if not self._parameters:
            raise UserError("model: expected at least one parameter that requires a gradient")
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
        start = 0
        for parameter in self._parameters:
            size, stride = parameter.shape, parameter.stride()
            piece = vector[start : start + parameter.numel()]
            yield piece.as_strided(size, stride, piece.storage_offset())
            start += parameter.numel()

    def keep_buffers(self) -> None:
        """Remember the module's buffers of real numbers, such as batch norm's statistics."""
        if self._kept is None:
            assert self.module is not None
            buffers = [b for b in self.module.buffers() if b.is_floating_point()]
            self._kept = buffers, [torch.empty_like(b) for b in buffers]
        buffers, kept = self._kept
        if buffers:
            torch._foreach_copy_(kept, buffers)

    def restore_buffers(self) -> None:
        """Make them what they were when :meth:`keep_buffers` was called last."""
        if self._kept is not None and self._kept[0]:
            torch._foreach_copy_(*self._kept)

    def bind_gradients(self, vector: Tensor) -> None:
        """Let the next gradient go into ``vector``, whatever it holds; further ones are added.

        Where backward is watched, ``vector`` holds all of it only after :meth:`settle`: autograd
        leaves its tensors in ``.grad``, from where :meth:`take` copies them. That is one pass
        over memory less than to clear the vector and to add to it.
        """
        views = self._views.get(vector.data_ptr())
        if views is None:
            # As .data, so that the loop's writes are told from the algorithm's by their versions.
            cut = (view.data for view in self._cut(vector))
            views = dict(zip(self._parameters, cut, strict=True))
            self._views[vector.data_ptr()] = views
        self._bound = views
        self.others.refresh()
        if self._takes:
            self._missing = set(views)
            for parameter in self._parameters:
                parameter.grad = None
            return
        vector.zero_()
        for parameter, view in self._bound.items():
            parameter.grad = None if parameter in self.others else view

    def take(self, parameter: nn.Parameter) -> None:
        """Backward has come by ``parameter``: put its gradient into the bound vector.

        Raises:
            UserError: the training loop has removed what an earlier backward pass had left.
        """
        view, gradient = self._bound[parameter], parameter.grad
        if self.others and parameter in self.others:
            self._missing.discard(parameter)
            convert_gradient(parameter, view)
            if self._versions is not None:
                self._versions[parameter] = _version(gradient)
            return
        if not _is_same(gradient, view):  # otherwise autograd has added to it
            if parameter not in self._missing:
                raise _unbound()
            self._missing.remove(parameter)
            if gradient is None:
                view.zero_()
            else:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                view.copy_(dense.detach())
        parameter.grad = view
        if self._versions is not None:
            self._versions[parameter] = view._version

    def has_gradient(self) -> bool:
        """Whether backward has made any since :meth:`bind_gradients`."""
        if self._takes:
            return any(parameter.grad is not None for parameter in self._parameters)
        views = (parameter.grad for parameter in self._parameters)
        return any(view is not None and bool(view.any()) for view in views)

    def settle(self, is_skipped: bool = False) -> None:
        """Backward is over, or there was none: what has had no gradient is zero.

        Raises:
            UserError: the training loop has unbound or changed gradients, or made none.
        """
        untouched = self._missing and len(self._missing) == len(self._bound) and not is_skipped
        if untouched and all(parameter.grad is None for parameter in self._missing):
            raise UserError(
                "training loop: expected gradients at step(), got none for any parameter; call "
                "loss.backward() before run.step(loss)"
            )
        for parameter in self._missing.copy():
            self.take(parameter)
        for parameter, view in self._bound.items():
            if self.others and parameter in self.others:
                self._settle_other(parameter, view)
            elif not _is_same(parameter.grad, view):
                raise _unbound()
            elif self._versions is not None and self._versions[parameter] != view._version:
                raise _changed()

    def _settle_other(self, parameter: nn.Parameter, view: Tensor) -> None:
        """Of another dtype, its gradient was converted when it came, if that was watched."""
        if self._versions is None:
            convert_gradient(parameter, view)
            return
        if self._versions[parameter] != _version(parameter.grad):
            raise _changed()

    def watch(self, layout: Layout, on_bucket: OnBucket, at_once: bool = True) -> BucketWatch:
        """Call ``on_bucket`` during backward, in order, as buckets are completed.

        ``at_once``: they are used then; :meth:`settle` refuses gradients that are changed later.
        """
        self._versions = {} if at_once else None
        watch = BucketWatch(layout, on_bucket, self.take)
        self._takes = True
        start = 0
        for parameter in self._parameters:
            watch.add(parameter, start, start + parameter.numel())
            start += parameter.numel()
        return watch

    def buffers(self) -> list[Tensor]:
        """What the flat vector leaves out: frozen parameters and the module's buffers."""
        assert self.module is not None
        frozen = [p.detach() for p in self.module.parameters() if not p.requires_grad]
        return frozen + list(self.module.buffers())


def _is_same(gradient: Tensor | None, view: Tensor) -> bool:
    """Whether a gradient lies where ``view`` does."""
    if gradient is None or gradient.is_sparse:
        return False
    return gradient.data_ptr() == view.data_ptr()


def _version(gradient: Tensor | None) -> int:
    """Which changes with every write to it, and when it is made or removed."""
    return -1 if gradient is None else gradient._version


def _changed() -> UserError:
    return UserError(
        "training loop: gradients were changed between backward() and step(), when they may have "
        "been sent already; give wait_free=False, so that they are sent at step()"
    )


def _unbound() -> UserError:
    return UserError(
        "training loop: a parameter's .grad was replaced; do not call optimizer.zero_grad() or "
        "model.zero_grad(): step() clears the gradients"
    )


class PhantomReplica(_Flat):
    """Only the sizes of a model, for computing that is timed and not done.

    Its vectors are ``meta`` tensors, which store nothing; what the wire needs of real
    memory belongs to :class:`~aladdin_mpi.compression.dense.DenseWire`.

    Args:
        numel: number of values.
        sizes: of the parameters and layers; None: one matrix.
    """

    module = None

    def __init__(self, numel: int, sizes: Outline | None = None) -> None:
        self.numel = numel
        self.parameters = torch.zeros(numel, device="meta")
        self._outline = sizes or Outline(((1, numel),), (numel,))

    def keep_buffers(self) -> None:
        """There are none."""

    def restore_buffers(self) -> None:
        """There are none."""

    def bind_gradients(self, vector: Tensor) -> None:
        """Nothing is calculated."""

    def buffers(self) -> list[Tensor]:
        """None."""
        return []


class BucketWatch:
    """Counts gradients as backward delivers them; tells of completed buckets in order.

    A bucket is told of only after all earlier ones, so that every rank sends in one
    order. Parameters that take no part in a step are found by :meth:`finish`.

    Args:
        take: called with each parameter whose gradient is there, before anybody is told.
    """

    def __init__(
        self, layout: Layout, on_bucket: OnBucket, take: Callable[[nn.Parameter], None]
    ) -> None:
        self._layout = layout
        self._on_bucket = on_bucket
        self._take = take
        self._needed = [0] * len(layout.buckets)
        self._missing: list[int] = []
        self._next = 0
        self._touched: dict[nn.Parameter, list[int]] = {}
        self._hooks: list[RemovableHandle] = []
        self.enabled = False

    def add(self, parameter: nn.Parameter, start: int, stop: int) -> None:
        """Watch the parameter that lies at ``[start, stop)``."""
        touched = [b.index for b in self._layout.buckets if b.start < stop and start < b.stop]
        for index in touched:
            self._needed[index] += 1
        self._touched[parameter] = touched
        hook = parameter.register_post_accumulate_grad_hook(lambda _: self.deliver(parameter))
        self._hooks.append(hook)

    def deliver(self, parameter: nn.Parameter) -> None:
        """The gradient of ``parameter`` is there. To be called where autograd has no part in it."""
        self._take(parameter)
        if self.enabled:
            self._arrived(self._touched[parameter])

    def start(self) -> None:
        """Begin a step."""
        self._missing = list(self._needed)
        self._next = 0
        self.enabled = True

    def _arrived(self, touched: list[int]) -> None:
        for index in touched:
            self._missing[index] -= 1
            if self._missing[index] < 0:
                raise UserError(
                    "training loop: a second backward() before step(); for several backward "
                    "passes in a step put all but the last into `with run.accumulate():`"
                )
        self._tell()

    def _tell(self) -> None:
        while self._next < len(self._missing) and self._missing[self._next] == 0:
            self._next += 1
            self._on_bucket(self._next - 1)

    def finish(self) -> None:
        """End a step: what has had no gradient counts as zero."""
        self.enabled = False
        self._missing = [0] * len(self._missing)
        self._tell()

    def close(self) -> None:
        """Watch no longer.

        Python's collector sees no cycle through a parameter's hook: without this all vectors of a
        run would be kept for as long as the process lives.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
