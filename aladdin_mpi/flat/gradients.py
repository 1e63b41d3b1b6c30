"""Gradients from autograd: hooks, views into the flat vector, complete buckets."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from aladdin_mpi.accelerator import is_accelerator
from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.dtypes import SeparateParameters
from aladdin_mpi.flat.layout import Bucket, Layout
from aladdin_mpi.flat.shards import local

_REDUCE = "__reduce_ex__"


class ModuleHook:
    """A hook that acts on one module only.

    Some modules, such as those of ``torch.fx``, copy their hooks themselves. In such a copy the
    hook is replaced by a no-op from the standard library, so that the copy can be loaded without
    this package. ``before_copy`` is called before the module is copied or pickled; it may remove
    the hook.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        before_copy: Callable[[], None] | None = None,
    ) -> None:
        self._module = module
        self._call = call
        self.before_copy = before_copy

    def __call__(self, module: nn.Module, *arguments: Any) -> Any:
        """Call the function, unless ``module`` is a copy that has inherited the hook."""
        return self._call(module, *arguments) if module is self._module else None

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle a function that does nothing."""
        return getattr, (nullcontext(), "__exit__")


class Hooks:
    """Module hooks of a run, which are removed together.

    A copy of such a module, made with ``copy``, ``pickle`` or ``torch.save``, has no hooks.
    """

    def __init__(self) -> None:
        self._added: list[tuple[nn.Module, RemovableHandle]] = []

    def add(
        self,
        module: nn.Module,
        register: Callable[..., RemovableHandle],
        call: Callable[..., Any],
        before_copy: Callable[[], None] | None = None,
        **how: Any,
    ) -> None:
        """Add a :class:`ModuleHook`.

        ``register`` is a method of ``module``, such as ``module.register_forward_hook``; ``how``
        holds its further arguments.
        """
        if "torch._dynamo" in sys.modules:  # as after torch.compile, which must not trace the hook
            call = torch.compiler.disable(call)
        self._added.append((module, register(ModuleHook(module, call, before_copy), **how)))
        # copy and pickle look at the object itself before its class. In __dict__, because modules
        # may store attributes elsewhere.
        module.__dict__[_REDUCE] = partial(_reduce, module)

    def remove(self) -> None:
        """Remove all hooks."""
        for module, handle in self._added:
            handle.remove()
            if not _of_runs(module.__dict__):
                module.__dict__.pop(_REDUCE, None)
        self._added.clear()


def _of_runs(state: dict[str, Any]) -> dict[int, ModuleHook]:
    """Return the hooks of runs among the attributes of a module, by their numbers."""
    return {
        number: hook
        for name, held in state.items()
        if name.endswith("_hooks") and isinstance(held, dict)
        for number, hook in held.items()
        if isinstance(hook, ModuleHook)
    }


def _reduce(module: nn.Module, protocol: Any) -> Any:
    """Replace ``module.__reduce_ex__``: reduce the module without the hooks of runs."""
    for hook in _of_runs(module.__dict__).values():
        if hook.before_copy is not None:
            hook.before_copy()
    reduced = type(module).__reduce_ex__(module, protocol)
    if isinstance(reduced, str):
        return reduced
    function, arguments, *states = reduced
    return (function, tuple(map(_without_hooks, arguments)), *map(_without_hooks, states))


def _without_hooks(state: Any) -> Any:
    """Return a module's attributes without the hooks of runs, or another object unchanged."""
    if isinstance(state, tuple):  # of a class with slots: (__dict__, slots)
        return tuple(map(_without_hooks, state))
    if not isinstance(state, dict):
        return state
    numbers = _of_runs(state).keys()
    kept = {name: value for name, value in state.items() if name != _REDUCE}
    # _forward_hooks_with_kwargs and similar dicts use the numbers of hooks as well.
    for name, held in kept.items():
        if "_hooks" in name and isinstance(held, dict) and not numbers.isdisjoint(held):
            kept[name] = type(held)((n, each) for n, each in held.items() if n not in numbers)
    return kept


class BoundGradients:
    """Gradients of backward, bound to a flat vector through a view for each parameter.

    Parameters are identified by their numbers in flat order.

    Args:
        parameters: in flat order.
        separate: parameters with memory of their own.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], separate: SeparateParameters) -> None:
        self._parameters = parameters
        self.numbers = {parameter: number for number, parameter in enumerate(parameters)}
        """Numbers of the parameters, in flat order."""
        self._separate = separate
        self._views_of: dict[int, list[Tensor]] = {}
        self._views: list[Tensor] = []
        self.missing: set[int] = set()
        """Parameters whose gradient has not been copied into the bound vector yet."""
        self._versions: list[int] | None = None
        self._seen: dict[int, int] = {}
        """Versions of gradients outside the bound vector, by their memory, which they may share."""
        self.unused: set[int] = set()
        """Parameters without a gradient from backward; complete after :meth:`end_backward`."""
        self.are_local = False
        """Whether gradients of backward are left to the training loop."""

    def notice_changes(self) -> None:
        """Make :meth:`end_backward` refuse gradients that are changed after they were taken."""
        self._versions = [0] * len(self._parameters)

    def bind(self, vector: Tensor, cut: Callable[[Tensor], Iterable[Tensor]]) -> None:
        """Direct the next gradient into ``vector``, overwriting it; further gradients are added.

        Autograd's tensors stay in ``.grad`` until they are taken: ``vector`` is complete only after
        :meth:`end_backward`. That saves one memory pass compared to zeroing and adding, and
        distinguishes a gradient of zero from a missing one. ``cut`` returns the views of
        ``vector``, with the parameters' shapes and strides.
        """
        views = self._views_of.get(vector.data_ptr())
        if views is None:
            # As .data, so that versions distinguish the training loop's writes from these.
            views = self._views_of[vector.data_ptr()] = [view.data for view in cut(vector)]
        self._views = views
        self.missing = set(range(len(views)))
        self.unused = set()
        self._seen.clear()
        for parameter in self._parameters:
            parameter.grad = None

    def take(self, number: int) -> None:
        """Copy a parameter's gradient into the bound vector, after backward has reached it.

        Raises:
            UserError: the training loop has removed the gradient of an earlier backward pass.
        """
        parameter, view = self._parameters[number], self._views[number]
        gradient = parameter.grad
        if gradient is None:
            self.unused.add(number)
        else:
            self.unused.discard(number)
        if self._separate and parameter in self._separate:
            self.missing.discard(number)
            _convert(gradient, view)
            if gradient is not None:
                self._seen[_memory(gradient)] = local(gradient)._version
            return
        if not _is_same(gradient, view):  # otherwise autograd has added to it
            if number not in self.missing:
                raise _unbound()
            self.missing.remove(number)
            _convert(gradient, view)
        parameter.grad = view
        if self._versions is not None:
            self._versions[number] = view._version

    def deliver(self, parameter: nn.Parameter) -> None:
        """Take the gradient of a parameter for which autograd does not compute one."""
        number = self.numbers[parameter]
        self.take(number)
        self.unused.discard(number)

    def take_missing(self, of: Sequence[int]) -> None:
        """Take the gradients that are still missing, with one call for all of them if possible."""
        numbers = [number for number in of if number in self.missing]
        gradients = [self._parameters[number].grad for number in numbers]
        dense = [g for g in gradients if g is not None and not g.is_sparse]
        if self._separate or len(dense) < len(numbers):
            for number in numbers:
                self.take(number)
        elif numbers:
            self._take_together(numbers, dense)

    def _take_together(self, numbers: Sequence[int], gradients: list[Tensor]) -> None:
        views = [self._views[number] for number in numbers]
        with torch.no_grad():
            torch._foreach_copy_(views, gradients)
        for number, view in zip(numbers, views, strict=True):
            self._parameters[number].grad = view
        if self._versions is not None:
            for number, view in zip(numbers, views, strict=True):
                self._versions[number] = view._version
        self.missing.difference_update(numbers)

    def has_any(self) -> bool:
        """Return whether backward has made any gradient since :meth:`bind`."""
        return any(parameter.grad is not None for parameter in self._parameters)

    def set_aside(self) -> list[Tensor | None]:
        """Remove all gradients from ``.grad``, and return them for :meth:`put_back`."""
        kept = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return kept

    def put_back(self, gradients: Sequence[Tensor | None]) -> None:
        """Replace ``.grad`` of all parameters."""
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def end_backward(self, is_skipped: bool = False, dropped: Set[int] = frozenset()) -> None:
        """End backward (or a step without it); gradients that were not computed become zero.

        Those of the parameters ``dropped`` count as not computed.

        Raises:
            UserError: the training loop has unbound or changed gradients, or made none.
        """
        for number in dropped:
            self._parameters[number].grad = None
        untouched = self.missing and len(self.missing) == len(self._views) and not is_skipped
        if untouched and all(self._parameters[number].grad is None for number in self.missing):
            raise UserError(
                "training loop: step() was called without a gradient of any parameter. Call "
                "loss.backward() before run.step(loss)."
            )
        for number in self.missing.copy():
            self.take(number)
        for number, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            if self._separate and parameter in self._separate:
                # Its gradient was converted on arrival, if changes are watched.
                if self._versions is None:
                    _convert(parameter.grad, view)
                elif self._has_changed(number):
                    raise _changed()
            elif parameter.grad is not view and not _is_same(parameter.grad, view):
                raise _unbound()
            elif self._versions is not None and self._versions[number] != view._version:
                raise _changed()

    def _has_changed(self, number: int) -> bool:
        """Return whether a gradient outside the bound vector has changed since it was taken."""
        gradient = self._parameters[number].grad
        if gradient is None:
            return number not in self.unused
        return self._seen.get(_memory(gradient)) != local(gradient)._version


def _convert(gradient: Tensor | None, into: Tensor) -> None:
    """Convert a gradient from backward into its view, or zero if it is None."""
    if gradient is None:
        into.zero_()
    else:
        into.copy_(local((gradient.to_dense() if gradient.is_sparse else gradient).detach()))


def _is_same(gradient: Tensor | None, view: Tensor) -> bool:
    """Return whether a gradient has the memory of ``view``."""
    if gradient is view:
        return True
    return (
        gradient is not None and not gradient.is_sparse and gradient.data_ptr() == view.data_ptr()
    )


def _memory(gradient: Tensor) -> int:
    """Return a number that identifies the memory of a gradient, or of this rank's part of it."""
    part = local(gradient)
    return id(gradient) if part.is_sparse else part.untyped_storage().data_ptr()


def _changed() -> UserError:
    return UserError(
        "training loop: gradients were changed between backward() and step(), when they may have "
        "been sent already. Pass wait_free=False, which sends them at step()."
    )


def _unbound() -> UserError:
    return UserError(
        "training loop: a parameter's .grad was replaced. Do not call optimizer.zero_grad() or "
        "model.zero_grad(), because step() clears the gradients."
    )


OnBucket = Callable[[Bucket], None]
"""Function called with a bucket when all of its gradients are available."""

LARGE = 1 << 16
"""Smallest gradient, in values, that is copied on arrival while cached: 256 KB of float32.

Smaller ones, and all on a GPU, are copied with their bucket in one call. In a ResNet-56's
step of 97 ms on one core, a call for each of its 170 parameters took 4 ms."""


class BucketWatch:
    """Watch that counts gradients during backward and reports completed buckets in order.

    A bucket is reported after all earlier ones, so that every rank sends in the same order, and
    after its ``gradients`` have been copied into the bound vector. :meth:`end` completes buckets
    with parameters that take no part in a step.
    """

    def __init__(
        self, layout: Layout, gradients: BoundGradients, parameters: Sequence[nn.Parameter]
    ) -> None:
        self._buckets = layout.buckets
        self._on_bucket: OnBucket = _ignore
        self._gradients = gradients
        self._waiting: list[list[int]] = [[] for _ in layout.buckets]
        self._needed = [0] * len(layout.buckets)
        self._missing: list[int] = []
        self._next = 0
        self._touched: list[list[int]] = []
        self._hooks: list[RemovableHandle] = []
        self.enabled = False
        start = 0
        for parameter in parameters:
            stop = start + local(parameter).numel()
            self._add(parameter, layout, start, stop)
            start = stop

    def _add(self, parameter: nn.Parameter, layout: Layout, start: int, stop: int) -> None:
        """Watch the parameter whose values have the places from ``start`` to ``stop``."""
        number = self._gradients.numbers[parameter]
        touched = [b.index for b in layout.buckets if b.start < stop and start < b.stop]
        for index in touched:
            self._needed[index] += 1
        self._touched.append(touched)
        waits = bool(touched) and (stop - start < LARGE or is_accelerator(parameter.device))
        if waits:
            self._waiting[touched[0]].append(number)

        def arrived(_: Tensor) -> None:
            if self._gradients.are_local:
                return
            if not (waits and self.enabled and number in self._gradients.missing):
                self._gradients.take(number)
            if self.enabled:
                self._arrived(touched)

        self._hooks.append(parameter.register_post_accumulate_grad_hook(arrived))

    def deliver(self, parameter: nn.Parameter) -> None:
        """Take the gradient of ``parameter``; call this if autograd does not compute it."""
        self._gradients.deliver(parameter)
        if self.enabled:
            self._arrived(self._touched[self._gradients.numbers[parameter]])

    def begin(self, on_bucket: OnBucket) -> None:
        """Start a step, whose buckets are reported to ``on_bucket``."""
        self._on_bucket = on_bucket
        self._missing = list(self._needed)
        self._next = 0
        self.enabled = True

    def _arrived(self, touched: list[int]) -> None:
        is_complete = False
        for index in touched:
            self._missing[index] -= 1
            is_complete = is_complete or self._missing[index] == 0
            if self._missing[index] < 0:
                raise UserError(
                    "training loop: a second backward() before step(). For several backward "
                    "passes in a step, put all but the last into `with run.accumulate():`. If a "
                    "module is called twice under torch.utils.checkpoint, pass use_reentrant=False."
                )
        if is_complete:
            self._report()

    def _report(self) -> None:
        """Report complete buckets up to the first incomplete one."""
        while self._next < len(self._missing) and self._missing[self._next] == 0:
            index, self._next = self._next, self._next + 1
            self._gradients.take_missing(self._waiting[index])
            self._on_bucket(self._buckets[index])

    def end(self) -> None:
        """End a step; gradients that were not computed are zero."""
        self.enabled = False
        self._missing = [0] * len(self._missing)
        self._report()

    def close(self) -> None:
        """Stop watching.

        Python's garbage collector does not detect cycles through a parameter's hook: without this
        call, all vectors of a run would be kept until the process exits.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _ignore(bucket: Bucket) -> None:
    """Do nothing: no step has started."""


class Listen(torch.autograd.Function):
    """The identity function; backward passes its errors to a callback."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, token: Tensor, hear: Callable[[Tensor], None]) -> Tensor:
        """Return ``output``; ``hear`` is called with its errors, see torch.autograd.Function."""
        ctx.mark_dirty(output)  # in place, so that later operations may be in place as well
        ctx.hear = hear
        return output

    @staticmethod
    def backward(ctx: Any, errors: Tensor) -> tuple[Tensor, None, None]:
        """Call ``hear`` with the errors and return them."""
        ctx.hear(errors)
        return errors, None, None
