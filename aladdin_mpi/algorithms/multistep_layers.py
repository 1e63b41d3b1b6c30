"""Fully connected layers whose gradient is computed from all ranks' activations and errors.

Each rank updates ``inputs / n`` columns of the weight. It needs the same columns of all
ranks' activations A (all-to-all) and all ranks' errors E in full (all-gather): the gradient
over all samples of the round is then one product, ``E^T A``. The bias is updated by every
rank in full.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from aladdin_mpi.allreduce.compressed import InOrder, Queued
from aladdin_mpi.codec.base import DenseWire
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.flat.replica import DenseLayer
from aladdin_mpi.flat.vectors import copy, scale
from aladdin_mpi.transport.base import Event, Transport
from aladdin_mpi.worker.worker import Worker


@dataclass(frozen=True)
class LayerContext:
    """Shared context of all pieces of a rank.

    Attributes:
        x: the module's flat parameters.
        wire: codec of gradients, activations and errors.
        weights: codec of weights, which are sent in full so that every rank gets the same.
        worker: its current gradient's check is applied to what is sent in place of a gradient.
    """

    transport: Transport
    order: InOrder
    x: Tensor
    wire: DenseWire
    weights: DenseWire
    worker: Worker

    @property
    def n(self) -> int:
        """Number of ranks."""
        return self.transport.size

    def to_all(self, message: Tensor, received: Tensor, filled: Event | None) -> Queued:
        """Send each rank its part of ``message``."""
        return self.order.put(lambda: self.transport.ialltoall(message, received), filled)

    def gather(self, message: Tensor, gathered: Tensor, filled: Event | None) -> Queued:
        """Collect all ranks' ``message``."""
        return self.order.put(lambda: self.transport.iallgather(message, gathered), filled)

    def sum(self, received: Tensor, numel: int | None = None) -> Tensor:
        """Return the mean over ranks of the received rows, on x's device and in its dtype.

        Args:
            received: one row from each rank.
            numel: number of valid values in each row; None: all.
        """
        wide = torch.promote_types(self.x.dtype, torch.float32)
        values, _ = self.wire.fetch(received)
        total = values[:, :numel].sum(0, dtype=wide)
        return total.div_(self.n).to(self.x.dtype)


class LayerPiece(ABC):
    """One piece on one rank; ``numel`` is the length of the part that this rank updates."""

    numel: int

    def __init__(self, context: LayerContext, bucket: Bucket) -> None:
        self.context = context
        self.bucket = bucket
        self.gathering = False

    @abstractmethod
    def send(self, g: Tensor, share: float, loss_scale: float) -> None:
        """Send each rank its part of the piece's gradient, which is complete.

        Args:
            g: the flat gradient.
            share: weight of this rank's gradient; the mean share is 1.
            loss_scale: factor in backward's errors, but not in the gradient.
        """

    @abstractmethod
    def summed(self) -> Tensor:
        """Wait for all ranks; return the mean gradient of this rank's part."""

    @abstractmethod
    def own(self) -> Tensor:
        """Return a copy of this rank's part of the parameters."""

    @abstractmethod
    def gather(self, values: Tensor) -> None:
        """Send this rank's updated part to all ranks."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for all ranks' parts, if they are in flight, and store them.

        If the group is revoked during the wait, they remain in flight.
        """


class GradientPiece(LayerPiece):
    """A bucket in n equal parts, the last of which may be padded."""

    def __init__(self, context: LayerContext, bucket: Bucket) -> None:
        super().__init__(context, bucket)
        n = context.n
        part = -(-bucket.numel // n)
        start = min(bucket.start + part * context.transport.rank, bucket.stop)
        self._own = slice(start, min(start + part, bucket.stop))
        self.numel = self._own.stop - start
        self._outgoing = context.wire.buffer(n * part)
        self._incoming = context.wire.buffer(n * part)
        # The second half of a step reuses the first half's buffers if the dtype is the same.
        same = context.wire.dtype == context.weights.dtype
        self._mine = self._incoming[:part] if same else context.weights.buffer(part)
        self._gathered = self._outgoing if same else context.weights.buffer(n * part)
        self._moving: Queued | None = None

    def send(self, g: Tensor, share: float, loss_scale: float) -> None:
        """Send each rank its part of the gradient."""
        values = g[self.bucket.part]
        if share != 1.0:
            scale(values, share)
        filled = self.context.wire.encode(values, self._outgoing[: values.numel()])
        self._moving = self.context.to_all(self._outgoing, self._incoming, filled)

    def summed(self) -> Tensor:
        """Return the mean gradient of this rank's part."""
        assert self._moving is not None
        self.context.order.wait(self._moving)
        if self.context.x.is_meta:
            return self.own()
        return self.context.sum(self._incoming.view(self.context.n, -1), self.numel)

    def own(self) -> Tensor:
        """Return a copy of this rank's part of the parameters."""
        own = self.context.x[self._own]
        return own if own.is_meta else own.clone()

    def gather(self, values: Tensor) -> None:
        """Send this rank's updated part to all ranks."""
        filled = self.context.weights.encode(values, self._mine[: values.numel()])
        self._moving = self.context.gather(self._mine, self._gathered, filled)
        self.gathering = True

    def finish(self) -> None:
        """Wait for all parts and store them."""
        if not self.gathering:
            return
        assert self._moving is not None
        if not self.context.order.wait(self._moving):
            return
        values, _ = self.context.weights.fetch(self._gathered[: self.bucket.numel])
        copy(self.context.x[self.bucket.part], values)
        self._moving = None
        self.gathering = False


class Capture:
    """The activations and errors of one layer in one step, row by row.

    A step may have several forward passes, each with some of the rows. ``fits`` is true
    if the inputs were 2-D with one row for each sample: only then is the gradient
    computed by :class:`DenseWeight` the layer's gradient.
    """

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, expected: int) -> None:
        """Start a step of ``expected`` samples."""
        self.expected = expected
        self.rows = 0
        self.fits = True
        self.activations: list[tuple[int, Tensor]] = []
        self.errors: list[tuple[int, Tensor]] = []

    def count(self, shape: torch.Size | None) -> int:
        """Record an input's shape; return the number of its first row."""
        first = self.rows
        if shape is None or len(shape) != 2 or first + shape[0] > self.expected:
            self.fits = False
        else:
            self.rows += shape[0]
        return first

    @property
    def is_complete(self) -> bool:
        """Whether the layer has processed every sample."""
        return self.fits and self.rows == self.expected


def stacked(parts: list[tuple[int, Tensor]], rows: int, width: int, like: Tensor) -> Tensor:
    """Return a matrix of ``rows`` rows with ``parts`` at their rows and zeros elsewhere."""
    if len(parts) == 1 and parts[0][1].shape[0] == rows:
        return parts[0][1]
    whole = torch.zeros(rows, width, dtype=like.dtype, device=like.device)
    for first, part in parts:
        whole[first : first + part.shape[0]] = part
    return whole


class DenseWeight(LayerPiece):
    """The weight of a fully connected layer, divided among the ranks by columns.

    ``exchanging`` is true if the gradient is computed from activations and errors; None: not
    known yet, as it depends on how the module uses the layer. Until then ranks send gradients.

    Args:
        batch: the largest number of samples of one rank's step.
    """

    def __init__(
        self, context: LayerContext, bucket: Bucket, layer: DenseLayer, batch: int
    ) -> None:
        super().__init__(context, bucket)
        n, rank = context.n, context.transport.rank
        self.layer = layer
        self.capture = Capture()
        self.exchanging: bool | None = True if context.x.is_meta else None
        self._width = width = -(-layer.inputs // n)
        edges = [min(width * i, layer.inputs) for i in range(n + 1)]
        self._columns = [slice(edges[i], edges[i + 1]) for i in range(n)]
        self._mine = self._columns[rank]
        self.numel = layer.outputs * (self._mine.stop - self._mine.start)
        self._message = context.weights.buffer(layer.outputs * width)
        self._gathered = context.weights.buffer(n * layer.outputs * width)
        self._room = {
            "activations": context.wire.buffer(n * batch * width),
            "errors": context.wire.buffer(n * batch * layer.outputs),
        }
        self.by_errors = False
        """Whether the current step's gradient is computed from activations and errors."""
        self._rows = 0
        self._sent: list[Tensor] = []
        self._activations: Queued | None = None
        self._moving: Queued | None = None
        self._blocks = torch.empty(0)

    def begin(self, rows: int, expected: int) -> None:
        """Start a step: at most ``rows`` samples on a rank, ``expected`` on this one."""
        self.by_errors = bool(self.exchanging)
        self._rows = rows
        self._activations = None
        self._sent.clear()
        self.capture.begin(expected)

    # -- sending --------------------------------------------------------------------
    def send_activations(self) -> None:
        """Send each rank its columns of the activations, before backward begins."""
        if not self.by_errors or self._activations is not None:
            return
        n, rows, width = self.context.n, self._rows, self._width
        received = self._room["activations"][: n * rows * width]
        if self.context.x.is_meta:
            message, filled = self.context.wire.buffer(n * rows * width), None
        else:
            values = stacked(self.capture.activations, rows, self.layer.inputs, self.context.x)
            self.context.worker.current.check.look(values, self.bucket.index)
            values = torch.nn.functional.pad(values, (0, n * width - self.layer.inputs))
            message, filled = self._stage(values.view(rows, n, width).transpose(0, 1))
        self._activations = self.context.to_all(message, received, filled)
        self._sent.append(message)

    def _stage(self, values: Tensor) -> tuple[Tensor, Event | None]:
        wire = self.context.wire
        return wire.stage(values.to(wire.dtype).reshape(-1))

    def send(self, g: Tensor, share: float, loss_scale: float) -> None:
        """Send the errors, or each rank's columns of the gradient."""
        if self.by_errors:
            self._send_errors(share / loss_scale)
        else:
            self._send_gradient(g[self.bucket.part], share)

    def _send_errors(self, share: float) -> None:
        n, rows, outputs = self.context.n, self._rows, self.layer.outputs
        received = self._room["errors"][: n * rows * outputs]
        if self.context.x.is_meta:
            message, filled = self.context.wire.buffer(rows * outputs), None
        else:
            errors = stacked(self.capture.errors, rows, outputs, self.context.x)
            values = errors.to(self.context.x.dtype) * share
            self.context.worker.current.check.look(values, self.bucket.index)
            message, filled = self._stage(values)
        self._moving = self.context.gather(message, received, filled)
        self._sent.append(message)

    def _send_gradient(self, g: Tensor, share: float) -> None:
        n, outputs, width = self.context.n, self.layer.outputs, self._width
        padded = torch.nn.functional.pad(g.view(outputs, -1), (0, n * width - self.layer.inputs))
        scale(padded, share)
        message, filled = self._stage(padded.view(outputs, n, width).transpose(0, 1))
        self._blocks = self.context.wire.buffer(message.numel())
        self._moving = self.context.to_all(message, self._blocks, filled)
        self._sent.append(message)

    # -- the update -----------------------------------------------------------------
    def summed(self) -> Tensor:
        """Return the mean gradient of this rank's columns."""
        assert self._moving is not None
        self.context.order.wait(self._moving)
        if not self.by_errors:
            blocks = self._blocks.view(self.context.n, -1)
            return self._own_columns(self.context.sum(blocks))
        assert self._activations is not None
        self.context.order.wait(self._activations)
        if self.context.x.is_meta:
            return self.own()
        activations = self._received("activations", self._width)
        errors = self._received("errors", self.layer.outputs)
        with torch.autocast(errors.device.type, enabled=False):
            gradient = errors.t() @ activations
        return self._own_columns(gradient.div_(self.context.n))

    def bias_gradient(self) -> Tensor:
        """Return the gradient of the bias; call after :meth:`summed`."""
        return self._received("errors", self.layer.outputs).sum(0).div_(self.context.n)

    def _received(self, name: str, width: int) -> Tensor:
        values = self._room[name][: self.context.n * self._rows * width]
        received, _ = self.context.wire.fetch(values)
        return received.view(-1, width).to(self.context.x.dtype)

    def _own_columns(self, blocks: Tensor) -> Tensor:
        """Return the blocks without padding, for this rank's columns."""
        own = self._mine.stop - self._mine.start
        return blocks.view(self.layer.outputs, self._width)[:, :own].reshape(-1)

    # -- receiving ------------------------------------------------------------------
    @property
    def _matrix(self) -> Tensor:
        return self.context.x[self.bucket.part].view(self.layer.outputs, self.layer.inputs)

    def own(self) -> Tensor:
        """Return a copy of this rank's columns of the weight."""
        if self.context.x.is_meta:
            return self.context.x[: self.numel]
        return self._matrix[:, self._mine].clone(memory_format=torch.contiguous_format).view(-1)

    def gather(self, values: Tensor) -> None:
        """Send this rank's updated columns to all ranks."""
        self._sent.clear()
        filled = self.context.weights.encode(values, self._message[: values.numel()])
        self._moving = self.context.gather(self._message, self._gathered, filled)
        self.gathering = True

    def finish(self) -> None:
        """Wait for all columns and store them."""
        if not self.gathering:
            return
        assert self._moving is not None
        if not self.context.order.wait(self._moving):
            return
        if not self.context.x.is_meta:
            blocks, _ = self.context.weights.fetch(self._gathered)
            for columns, block in zip(self._columns, blocks.view(self.context.n, -1), strict=True):
                part = self._matrix[:, columns]
                part.copy_(block[: part.numel()].view(part.shape))
        self.gathering = False


class DenseBias(LayerPiece):
    """The bias of such a layer: updated in full by every rank, never sent."""

    def __init__(self, context: LayerContext, bucket: Bucket, weight: DenseWeight) -> None:
        super().__init__(context, bucket)
        self.numel = bucket.numel
        self._weight = weight
        self._gradients = torch.empty(0)
        self._moving: Queued | None = None
        self._message = torch.empty(0)
        self._updated: Tensor | None = None

    def send(self, g: Tensor, share: float, loss_scale: float) -> None:
        """Send the gradient, unless it follows from the errors that the weight sends."""
        if self._weight.by_errors:
            return
        wire = self.context.wire
        values = g[self.bucket.part].to(wire.dtype, copy=True)
        scale(values, share)
        self._message, filled = wire.stage(values)
        self._gradients = wire.buffer(self.context.n * self.numel)
        self._moving = self.context.gather(self._message, self._gradients, filled)

    def summed(self) -> Tensor:
        """Return the mean gradient of the bias; call after the weight's ``summed``."""
        if self.context.x.is_meta:
            return self.own()
        if self._weight.by_errors:
            return self._weight.bias_gradient()
        assert self._moving is not None
        self.context.order.wait(self._moving)
        return self.context.sum(self._gradients.view(self.context.n, -1))

    def own(self) -> Tensor:
        """Return a copy of the whole bias."""
        own = self.context.x[self.bucket.part]
        return own if own.is_meta else own.clone()

    def gather(self, values: Tensor) -> None:
        """Keep the update, which every rank computes, until :meth:`finish`."""
        self._updated = values
        self.gathering = True

    def finish(self) -> None:
        """Store the updated bias."""
        if self._updated is not None:
            copy(self.context.x[self.bucket.part], self._updated)
        self._updated = None
        self.gathering = False
