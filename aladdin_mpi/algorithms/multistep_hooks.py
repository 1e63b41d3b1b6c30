"""Hooks in the module: layers wait for their parameters, dense layers record their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from math import ceil
from typing import Any, Literal

import torch
from torch import Tensor, nn

from aladdin_mpi.algorithms.multistep_layers import DenseWeight, LayerPiece
from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.gradients import Hooks, Listen
from aladdin_mpi.flat.layout import BYTES_PER_MB, BYTES_PER_VALUE, Bucket, Layout
from aladdin_mpi.flat.replica import DenseLayer, places

Exchange = Literal["auto", "gradients", "activations"]
"""How the gradients of fully connected layers are exchanged."""


def choose(
    dense: Sequence[DenseLayer], exchange: Exchange, workers: int, batch: int
) -> list[DenseLayer]:
    """Return the layers that exchange activations and errors.

    With ``auto`` these are the layers for which that sends fewer values than exchanging the
    gradient, ``B (inputs + P outputs) < inputs * outputs``: B are the samples of one worker's
    step, P the workers.
    """
    if exchange == "auto":
        return [
            layer
            for layer in dense
            if batch * (layer.inputs + workers * layer.outputs) < layer.inputs * layer.outputs
        ]
    return list(dense) if exchange == "activations" else []


def cut_at_layers(
    layers: Sequence[int], apart: Sequence[DenseLayer], numel: int, bucket_mb: float
) -> Layout:
    """Cut a flat vector so that a layer waits for little more than its own parameters.

    Consecutive layers share a bucket while they fit; a larger layer is cut into equal
    buckets. A weight and a bias of ``apart`` have one bucket each, whatever their size.

    Args:
        layers: number of values of each layer, in flat order.
        apart: fully connected layers that exchange activations and errors.
        numel: length of the flat vector.
        bucket_mb: largest message in MB (10^6 bytes).
    """
    most = max(1, int(bucket_mb * BYTES_PER_MB) // BYTES_PER_VALUE)
    own = {slice_.start: slice_ for layer in apart for slice_ in _parameters(layer)}
    spans: list[tuple[int, int]] = []
    start = shared = 0
    for size in layers:
        stop = start + size
        if start in own:
            while start < stop:
                spans.append((start, own[start].stop))
                start = shared = own[start].stop
        elif shared < start and stop - shared <= most:
            spans[-1] = (shared, stop)
        else:
            pieces = ceil(size / most)
            edges = [start + size * i // pieces for i in range(pieces + 1)]
            spans += list(pairwise(edges))
            shared = start if pieces == 1 else stop
        start = stop
    buckets = tuple(Bucket(i, first, last, 0) for i, (first, last) in enumerate(spans))
    if sum(bucket.numel for bucket in buckets) != numel:
        raise ValueError(f"cut_at_layers: expected layers of {numel} values, got {sum(layers)}")
    return Layout(numel, 0, buckets)


def _parameters(layer: DenseLayer) -> list[slice]:
    return [layer.weight] if layer.bias is None else [layer.weight, layer.bias]


def describe(layer: DenseLayer, workers: int, batch: int, value_bytes: int) -> str:
    """Return a description of a worker's traffic in a step for a layer's weight, in both ways.

    ``batch`` is the number of samples of its step, ``value_bytes`` the size of an activation,
    an error or a gradient on the wire; weights have 4 bytes.
    """
    inputs, outputs = layer.inputs, layer.outputs
    others = workers - 1
    weights = others / workers * inputs * outputs
    gather = weights * BYTES_PER_VALUE
    exchange = gather + others * (batch * inputs / workers + batch * outputs) * value_bytes
    gradients = gather + weights * value_bytes
    return (
        f"{layer.name or 'the model'} ({inputs} x {outputs}): {exchange / BYTES_PER_MB:.4g} MB a "
        f"step with activations and errors, {gradients / BYTES_PER_MB:.4g} MB with gradients"
    )


class LayerHooks:
    """The hooks of a module, to be installed while it trains.

    Args:
        pieces: pieces of the flat vector.
        finish: waits for a piece and stores it.
        send_activations: called when a dense layer has processed all of a step's samples.
        deliver: called with a parameter whose gradient comes from exchanged activations and
            errors, not from autograd.
    """

    def __init__(
        self,
        module: nn.Module,
        pieces: Sequence[LayerPiece],
        finish: Callable[[LayerPiece], None],
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
        """Install hooks on every layer that has its own parameters."""
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
            for part in self._first_row:  # an error has interrupted the forward pass
                self._require(part, True)
            self._first_row.clear()
            hooks.remove()
            for handle in of_weights:
                handle.remove()

    @contextmanager
    def step(self, computes: bool) -> Iterator[None]:
        """Enclose the passes of one step; ``computes``: this rank has samples."""
        # A layer whose parameters are used without calling it cannot wait by itself.
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
        """Set whether autograd computes the gradients of a dense layer's parameters."""
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
        listened: Tensor = Listen.apply(output, self._token, self._error_recorder(part, first))
        return listened

    def _error_recorder(self, part: nn.Module, first: int) -> Callable[[Tensor], None]:
        def record(errors: Tensor) -> None:
            self._dense[part].capture.errors.append((first, errors))
            for parameter in self._parameters(part):
                self._deliver(parameter)

        return record

    def _refuse(self, part: nn.Module, _: Tensor) -> None:
        if self.active and self._dense[part].by_errors:
            raise _misused(self._dense[part])


def _needs(module: nn.Module, pieces: Sequence[LayerPiece]) -> dict[nn.Module, list[LayerPiece]]:
    """Return, for every layer, the pieces that contain its own parameters."""
    at = places(module)
    needs: dict[nn.Module, list[LayerPiece]] = {}
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
        f"layer {piece.layer.name or 'of the model'}: its input or the use of its weight differs "
        "from the first step. Exchanging activations requires one 2-D input with a row for each "
        "sample of the batch, and no other use of the weight. Use --multistep-exchange gradients."
    )
