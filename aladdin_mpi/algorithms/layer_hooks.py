"""What happens inside the module: layers wait for their parameters, dense ones are listened to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aladdin_mpi.algorithms.dense_pieces import DenseWeight
from aladdin_mpi.algorithms.layer_pieces import Piece
from aladdin_mpi.errors import UserError
from aladdin_mpi.model.hooks import Hooks
from aladdin_mpi.model.listen import Listen
from aladdin_mpi.model.replica import places


class LayerHooks:
    """The hooks of a module, to be installed while it trains.

    Args:
        pieces: of the flat vector.
        finish: waits for one and stores it.
        send_activations: called when a dense layer has seen all of a step's samples.
        deliver: called with a parameter whose gradient comes from exchanged activations and errors,
            and not from autograd.
    """

    def __init__(
        self,
        module: nn.Module,
        pieces: Sequence[Piece],
        finish: Callable[[Piece], None],
        send_activations: Callable[[], None],
        deliver: Callable[[nn.Parameter], None],
    ) -> None:
        self.active = False
        self._finish = finish
        self._send_activations = send_activations
        self._deliver = deliver
        self._needs = _needs(module, pieces)
        self._dense = {
            module.get_submodule(piece.layer.name): piece
            for piece in pieces
            if isinstance(piece, DenseWeight)
        }
        self._called: set[nn.Module] = set()
        self._never_called: set[nn.Module] = set()
        self._first_row: dict[nn.Module, int] = {}
        self._token = torch.zeros((), requires_grad=True)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Hooks on every layer that has parameters of its own."""
        hooks, of_weights = Hooks(), []
        for part in self._needs:
            register = part.register_forward_pre_hook
            hooks.add(part, register, self._before_layer, prepend=True)
        for part in self._dense:
            weight = part.get_parameter("weight")
            hooks.add(part, part.register_forward_pre_hook, self._before_dense)
            hooks.add(part, part.register_forward_hook, self._after_dense)
            # Parameters are copied without their hooks.
            refuse = partial(self._refuse, part)
            of_weights.append(weight.register_post_accumulate_grad_hook(refuse))
        try:
            yield
        finally:
            for part in self._first_row:  # an error has left the forward pass
                self._require(part, True)
            self._first_row.clear()
            hooks.remove()
            for handle in of_weights:
                handle.remove()

    @contextmanager
    def step(self, computes: bool) -> Iterator[None]:
        """The passes of one step are in here; ``computes``: there are samples for any."""
        # A layer whose parameters are used without its being called cannot wait by itself.
        for part in self._never_called:
            self._wait_for(part)
        self._called.clear()
        self.active = True
        try:
            yield
        finally:
            self.active = False
        if computes:
            self._never_called |= self._needs.keys() - self._called

    def _wait_for(self, part: nn.Module) -> None:
        for piece in self._needs[part]:
            self._finish(piece)

    def _before_layer(self, part: nn.Module, inputs: Any) -> None:
        if self.active:
            self._called.add(part)
            self._wait_for(part)

    def _before_dense(self, part: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self.active and torch.is_grad_enabled():
            self._listen(part, inputs[0] if inputs else None)

    def _listen(self, part: nn.Module, values: Tensor | None) -> None:
        piece = self._dense[part]
        first = piece.capture.count(None if values is None else values.shape)
        if not piece.by_errors:
            return
        if not piece.capture.fits or values is None:
            raise _misused(piece)
        piece.capture.activations.append((first, values.detach().clone()))
        self._first_row[part] = first
        self._require(part, False)
        self._send_activations()

    def _require(self, part: nn.Module, wanted: bool) -> None:
        """Whether autograd shall compute the gradients of a dense layer's parameters."""
        for parameter in self._parameters(part):
            parameter.requires_grad_(wanted)

    def _parameters(self, part: nn.Module) -> list[nn.Parameter]:
        layer = self._dense[part].layer
        names = ["weight"] if layer.bias is None else ["weight", "bias"]
        return [part.get_parameter(name) for name in names]

    def _after_dense(self, part: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        first = self._first_row.pop(part, None)
        if first is None:
            return None
        self._require(part, True)
        listened: Tensor = Listen.apply(output, self._token, self._hear(part, first))
        return listened

    def _hear(self, part: nn.Module, first: int) -> Callable[[Tensor], None]:
        def hear(errors: Tensor) -> None:
            self._dense[part].capture.errors.append((first, errors))
            for parameter in self._parameters(part):
                self._deliver(parameter)

        return hear

    def _refuse(self, part: nn.Module, _: Tensor) -> None:
        if self.active and self._dense[part].by_errors:
            raise _misused(self._dense[part])


def _needs(module: nn.Module, pieces: Sequence[Piece]) -> dict[nn.Module, list[Piece]]:
    """The pieces in which the own parameters of every layer lie."""
    at = places(module)
    needs: dict[nn.Module, list[Piece]] = {}
    for part in module.modules():
        own = [at[p] for p in part.parameters(recurse=False) if p in at]
        if own:
            needs[part] = [
                piece
                for piece in reversed(pieces)
                if any(piece.bucket.start < p.stop and p.start < piece.bucket.stop for p in own)
            ]
    return needs


def _misused(piece: DenseWeight) -> UserError:
    return UserError(
        f"layer {piece.layer.name or 'of the model'}: expected, as in the first step, one 2-D "
        "input with a row for each sample of the batch and no other use of the weight, got "
        "something else; use --multistep-exchange gradients"
    )
