"""Buckets along the layers, and which fully connected layers travel as activations and errors.

Lee, Agrawal, Balaprakash, Choudhary and Liao (MLHPC 2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from typing import Literal

from aladdin_mpi.model.layout import BYTES_PER_MB, BYTES_PER_VALUE, Bucket, Layout
from aladdin_mpi.model.replica import DenseLayer

Exchange = Literal["auto", "gradients", "activations"]
"""How the gradients of fully connected layers come together."""


def choose(
    dense: Sequence[DenseLayer], exchange: Exchange, workers: int, batch: int
) -> list[DenseLayer]:
    """The layers that exchange activations and errors.

    With ``auto`` those for which ``B (inputs + P outputs) < inputs * outputs``, where that
    sends fewer values than the gradient's way does: B the samples of one worker's step, P
    the workers.
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

    Consecutive layers share a bucket while they fit in; a larger layer is cut into equal
    ones. A weight and a bias of ``apart`` have one bucket each, whatever their size.

    Args:
        layers: the numbers of values of the layers, in flat order.
        apart: fully connected layers that are exchanged in their own way.
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
    """What a worker sends in a step for a layer's weight, in both ways.

    ``batch`` are the samples of its step, ``value_bytes`` those of an activation, an error
    or a gradient on the wire; weights have 4.
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
