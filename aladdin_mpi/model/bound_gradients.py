"""Gradients on their way from autograd into a flat vector, whose parts ``.grad`` are bound to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from aladdin_mpi.errors import UserError
from aladdin_mpi.model.other_dtypes import OtherDtypes, convert_gradient


class BoundGradients:
    """Where backward's gradients go: for each parameter, a view of a flat vector.

    A parameter is known by its number in the flat order.

    Args:
        parameters: in flat order.
        others: those of another dtype than the flat vector.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], others: OtherDtypes) -> None:
        self._parameters = parameters
        self.numbers = {parameter: number for number, parameter in enumerate(parameters)}
        """Of each parameter, in flat order."""
        self._others = others
        self._views_of: dict[int, list[Tensor]] = {}
        self._views: list[Tensor] = []
        self._missing: set[int] = set()
        self._versions: list[int] | None = None
        self.unused: set[int] = set()
        """The parameters of which backward has made no gradient; complete when it is over."""

    def notice_changes(self) -> None:
        """From now on :meth:`end_backward` refuses gradients that are changed after they came."""
        self._versions = [0] * len(self._parameters)

    def bind(self, vector: Tensor, cut: Callable[[Tensor], Iterable[Tensor]]) -> None:
        """Let the next gradient go into ``vector``, whatever it holds; further ones are added.

        Autograd's tensors stay in ``.grad`` until they are taken: ``vector`` holds all of them only
        after :meth:`end_backward`. That is one pass over memory less than to clear the vector and
        to add to it, and it tells a gradient of zero from none.

        Args:
            vector: flat.
            cut: its views, shaped and strided as the parameters.
        """
        views = self._views_of.get(vector.data_ptr())
        if views is None:
            # As .data, so that the loop's writes are told from the algorithm's by their versions.
            views = self._views_of[vector.data_ptr()] = [view.data for view in cut(vector)]
        self._views = views
        self._missing = set(range(len(views)))
        self.unused = set()
        for parameter in self._parameters:
            parameter.grad = None

    def take(self, number: int) -> None:
        """Backward has come by a parameter: put its gradient into the bound vector.

        Raises:
            UserError: the training loop has removed what an earlier backward pass had left.
        """
        parameter, view = self._parameters[number], self._views[number]
        gradient = parameter.grad
        if gradient is None:
            self.unused.add(number)
        else:
            self.unused.discard(number)
        if self._others and parameter in self._others:
            self._missing.discard(number)
            convert_gradient(parameter, view)
            self._note_version(number, gradient)
            return
        if not _is_same(gradient, view):  # otherwise autograd has added to it
            if number not in self._missing:
                raise _unbound()
            self._missing.remove(number)
            if gradient is None:
                view.zero_()
            else:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                view.copy_(dense.detach())
        parameter.grad = view
        self._note_version(number, view)

    def deliver(self, parameter: nn.Parameter) -> None:
        """Take the gradient of a parameter for which autograd does not compute one."""
        number = self.numbers[parameter]
        self.take(number)
        self.unused.discard(number)

    def is_missing(self, number: int) -> bool:
        """Whether nothing has been put into the bound vector for a parameter."""
        return number in self._missing

    def take_missing(self, of: Sequence[int]) -> None:
        """Take those that are still missing, in one call for all of them where that can be."""
        numbers = [number for number in of if number in self._missing]
        gradients = [self._parameters[number].grad for number in numbers]
        dense = [g for g in gradients if g is not None and not g.is_sparse]
        if self._others or len(dense) < len(numbers):
            for number in numbers:
                self.take(number)
        elif numbers:
            self._copy(numbers, dense)

    def _copy(self, numbers: Sequence[int], gradients: list[Tensor]) -> None:
        views = [self._views[number] for number in numbers]
        with torch.no_grad():
            torch._foreach_copy_(views, gradients)
        for number, view in zip(numbers, views, strict=True):
            self._parameters[number].grad = view
            self._note_version(number, view)
        self._missing.difference_update(numbers)

    def _note_version(self, number: int, gradient: Tensor | None) -> None:
        if self._versions is not None:
            self._versions[number] = _version(gradient)

    def has_any(self) -> bool:
        """Whether backward has made any since :meth:`bind`."""
        return any(parameter.grad is not None for parameter in self._parameters)

    def end_backward(self, is_skipped: bool = False) -> None:
        """Backward is over, or there was none: what has had no gradient is zero.

        Raises:
            UserError: the training loop has unbound or changed gradients, or made none.
        """
        untouched = self._missing and len(self._missing) == len(self._views) and not is_skipped
        if untouched and all(self._parameters[number].grad is None for number in self._missing):
            raise UserError(
                "training loop: expected gradients at step(), got none for any parameter; call "
                "loss.backward() before run.step(loss)"
            )
        for number in self._missing.copy():
            self.take(number)
        for number, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            if self._others and parameter in self._others:
                self._end_other(number)
            elif not _is_same(parameter.grad, view):
                raise _unbound()
            elif self._versions is not None and self._versions[number] != view._version:
                raise _changed()

    def _end_other(self, number: int) -> None:
        """Of another dtype, its gradient was converted when it came, if that was watched."""
        parameter = self._parameters[number]
        if self._versions is None:
            convert_gradient(parameter, self._views[number])
            return
        if self._versions[number] != _version(parameter.grad):
            raise _changed()


def _is_same(gradient: Tensor | None, view: Tensor) -> bool:
    """Whether a gradient lies where ``view`` does."""
    if gradient is view:
        return True
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
