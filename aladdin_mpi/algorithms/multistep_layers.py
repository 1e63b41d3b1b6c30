"""Fully connected layers whose gradient is computed from everyone's activations and errors.

Each rank updates ``inputs / n`` columns of the weight. For these it needs the same columns of
everyone's activations A (all-to-all) and everyone's errors E in full (all-gather): then the
gradient over all samples of the round is one product, ``E^T A``. The bias is updated by every
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
    """What all pieces of a rank stand on.

    Attributes:
        x: the module's flat parameters.
        wire: for gradients, activations and errors.
        weights: for weights, which travel in full: every rank has to get the same.
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
        """Collect everyone's ``message``."""
        return self.order.put(lambda: self.transport.iallgather(message, gathered), filled)

    def sum(self, received: Tensor, numel: int | None = None) -> Tensor:
        """The mean over ranks of what they sent, one a row; on x's device, in its dtype.

        Args:
            received: all that has come.
            numel: how many values of each row count; None: all.
        """
        wide = torch.promote_types(self.x.dtype, torch.float32)
        there, _ = self.wire.fetch(received)
        total = there[:, :numel].sum(0, dtype=wide)
        return total.div_(self.n).to(self.x.dtype)


class LayerPiece(ABC):
    """One piece, on one rank; ``numel`` is the length of the part that this rank updates."""

    numel: int

    def __init__(self, ground: LayerContext, bucket: Bucket) -> None:
        self.ground = ground
        self.bucket = bucket
        self.gathering = False

    @abstractmethod
    def send(self, g: Tensor, share: float, loss_scale: float) -> None:
        """The gradient of the piece is there: send everyone's part of it.

        Args:
            g: the flat gradient.
            share: what this rank's gradient weighs; the mean share is 1.
            loss_scale: what backward's errors, but not the gradient, are multiplied by.
        """

    @abstractmethod
    def summed(self) -> Tensor:
        """Wait for everyone's; the mean gradient of the own part."""

    @abstractmethod
    def own(self) -> Tensor:
        """A copy of the own part of the parameters."""

    @abstractmethod
    def gather(self, values: Tensor) -> None:
        """Send the own part, updated, to everyone."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for everyone's parts, if they are on their way, and store them."""


class GradientPiece(LayerPiece):
    """A bucket in n equal parts, the last of which may be filled up."""

    def __init__(self, ground: LayerContext, bucket: Bucket) -> None:
        super().__init__(ground, bucket)
        n = ground.n
        part = -(-bucket.numel // n)
        start = min(bucket.start + part * ground.transport.rank, bucket.stop)
        self._own = slice(start, min(start + part, bucket.stop))
        self.numel = self._own.stop - start
        self._outgoing = ground.wire.buffer(n * part)
        self._incoming = ground.wire.buffer(n * part)
        # The second half of a step takes the room of the first, where the dtype is the same.
        same = ground.wire.dtype == ground.weights.dtype
        self._mine = self._incoming[:part] if same else ground.weights.buffer(part)
        self._gathered = self._outgoing if same else ground.weights.buffer(n * part)
        self._moving: Queued | None = None

    def send(self, g: Tensor, share: float, loss_scale: float) -> None:
        """See :meth:`Piece.send`."""
        values = g[self.bucket.part]
        if share != 1.0:
            scale(values, share)
        filled = self.ground.wire.encode(values, self._outgoing[: values.numel()])
        self._moving = self.ground.to_all(self._outgoing, self._incoming, filled)

    def summed(self) -> Tensor:
        """See :meth:`Piece.summed`."""
        assert self._moving is not None
        self.ground.order.wait(self._moving)
        if self.ground.x.is_meta:
            return self.own()
        return self.ground.sum(self._incoming.view(self.ground.n, -1), self.numel)

    def own(self) -> Tensor:
        """See :meth:`Piece.own`."""
        own = self.ground.x[self._own]
        return own if own.is_meta else own.clone()

    def gather(self, values: Tensor) -> None:
        """See :meth:`Piece.gather`."""
        filled = self.ground.weights.encode(values, self._mine[: values.numel()])
        self._moving = self.ground.gather(self._mine, self._gathered, filled)
        self.gathering = True

    def finish(self) -> None:
        """See :meth:`Piece.finish`."""
        if not self.gathering:
            return
        assert self._moving is not None
        self.ground.order.wait(self._moving)
        there, _ = self.ground.weights.fetch(self._gathered[: self.bucket.numel])
        copy(self.ground.x[self.bucket.part], there)
        self._moving = None
        self.gathering = False


class Capture:
    """The activations and errors of one layer in one step, row by row.

    A step may have several forward passes, each with some of the rows. ``fits`` says
    whether the inputs were 2-D with one row for each sample: only then is the layer's
    gradient what :class:`DenseWeight` makes of them.
    """

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, expected: int) -> None:
        """A step of ``expected`` samples begins."""
        self.expected = expected
        self.rows = 0
        self.fits = True
        self.activations: list[tuple[int, Tensor]] = []
        self.errors: list[tuple[int, Tensor]] = []

    def count(self, shape: torch.Size | None) -> int:
        """Note an input of this shape; the number of its first row."""
        first = self.rows
        if shape is None or len(shape) != 2 or first + shape[0] > self.expected:
            self.fits = False
        else:
            self.rows += shape[0]
        return first

    @property
    def is_complete(self) -> bool:
        """Whether the layer has seen every sample."""
        return self.fits and self.rows == self.expected


def stacked(parts: list[tuple[int, Tensor]], rows: int, width: int, like: Tensor) -> Tensor:
    """A matrix of ``rows`` rows from parts of it, zero where there is none."""
    if len(parts) == 1 and parts[0][1].shape[0] == rows:
        return parts[0][1]
    whole = torch.zeros(rows, width, dtype=like.dtype, device=like.device)
    for first, part in parts:
        whole[first : first + part.shape[0]] = part
    return whole


class DenseWeight(LayerPiece):
    """The weight of a fully connected layer, dealt to the ranks by columns.

    ``exchanging`` says whether activations and errors make the gradient; None: not known
    yet, as that depends on how the module uses the layer. Gradients do until then.

    Args:
        batch: the largest number of samples of one rank's step.
    """

    def __init__(self, ground: LayerContext, bucket: Bucket, layer: DenseLayer, batch: int) -> None:
        super().__init__(ground, bucket)
        n, rank = ground.n, ground.transport.rank
        self.layer = layer
        self.capture = Capture()
        self.exchanging: bool | None = True if ground.x.is_meta else None
        self._width = width = -(-layer.inputs // n)
        edges = [min(width * i, layer.inputs) for i in range(n + 1)]
        self._columns = [slice(edges[i], edges[i + 1]) for i in range(n)]
        self._mine = self._columns[rank]
        self.numel = layer.outputs * (self._mine.stop - self._mine.start)
        self._message = ground.weights.buffer(layer.outputs * width)
        self._gathered = ground.weights.buffer(n * layer.outputs * width)
        self._room = {
            "activations": ground.wire.buffer(n * batch * width),
            "errors": ground.wire.buffer(n * batch * layer.outputs),
        }
        self.by_errors = False
        """Whether activations and errors make the current step's gradient."""
        self._rows = 0
        self._sent: list[Tensor] = []
        self._activations: Queued | None = None
        self._moving: Queued | None = None
        self._blocks = torch.empty(0)

    def begin(self, rows: int, expected: int) -> None:
        """A step begins: ``rows`` samples on the rank that has most, ``expected`` on this one."""
        self.by_errors = bool(self.exchanging)
        self._rows = rows
        self._activations = None
        self._sent.clear()
        self.capture.begin(expected)

    # -- the way there ------------------------------------------------------------
    def send_activations(self) -> None:
        """Send everyone its columns of the activations, at the latest when backward begins."""
        if not self.by_errors or self._activations is not None:
            return
        n, rows, width = self.ground.n, self._rows, self._width
        received = self._room["activations"][: n * rows * width]
        if self.ground.x.is_meta:
            message, filled = self.ground.wire.buffer(n * rows * width), None
        else:
            values = stacked(self.capture.activations, rows, self.layer.inputs, self.ground.x)
            self.ground.worker.current.check.look(values, self.bucket.index)
            values = torch.nn.functional.pad(values, (0, n * width - self.layer.inputs))
            message, filled = self._stage(values.view(rows, n, width).transpose(0, 1))
        self._activations = self.ground.to_all(message, received, filled)
        self._sent.append(message)

    def _stage(self, values: Tensor) -> tuple[Tensor, Event | None]:
        wire = self.ground.wire
        return wire.stage(values.to(wire.dtype).reshape(-1))

    def send(self, g: Tensor, share: float, loss_scale: float) -> None:
        """See :meth:`Piece.send`: the errors, or the gradient's columns."""
        if self.by_errors:
            self._send_errors(share / loss_scale)
        else:
            self._send_gradient(g[self.bucket.part], share)

    def _send_errors(self, share: float) -> None:
        n, rows, outputs = self.ground.n, self._rows, self.layer.outputs
        received = self._room["errors"][: n * rows * outputs]
        if self.ground.x.is_meta:
            message, filled = self.ground.wire.buffer(rows * outputs), None
        else:
            errors = stacked(self.capture.errors, rows, outputs, self.ground.x)
            values = errors.to(self.ground.x.dtype) * share
            self.ground.worker.current.check.look(values, self.bucket.index)
            message, filled = self._stage(values)
        self._moving = self.ground.gather(message, received, filled)
        self._sent.append(message)

    def _send_gradient(self, g: Tensor, share: float) -> None:
        n, outputs, width = self.ground.n, self.layer.outputs, self._width
        padded = torch.nn.functional.pad(g.view(outputs, -1), (0, n * width - self.layer.inputs))
        scale(padded, share)
        message, filled = self._stage(padded.view(outputs, n, width).transpose(0, 1))
        self._blocks = self.ground.wire.buffer(message.numel())
        self._moving = self.ground.to_all(message, self._blocks, filled)
        self._sent.append(message)

    # -- the update -----------------------------------------------------------------
    def summed(self) -> Tensor:
        """See :meth:`Piece.summed`."""
        assert self._moving is not None
        self.ground.order.wait(self._moving)
        if not self.by_errors:
            blocks = self._blocks.view(self.ground.n, -1)
            return self._own_columns(self.ground.sum(blocks))
        assert self._activations is not None
        self.ground.order.wait(self._activations)
        if self.ground.x.is_meta:
            return self.own()
        activations = self._received("activations", self._width)
        errors = self._received("errors", self.layer.outputs)
        with torch.autocast(errors.device.type, enabled=False):
            gradient = errors.t() @ activations
        return self._own_columns(gradient.div_(self.ground.n))

    def bias_gradient(self) -> Tensor:
        """The gradient of the bias; after :meth:`summed`."""
        return self._received("errors", self.layer.outputs).sum(0).div_(self.ground.n)

    def _received(self, name: str, width: int) -> Tensor:
        values = self._room[name][: self.ground.n * self._rows * width]
        there, _ = self.ground.wire.fetch(values)
        return there.view(-1, width).to(self.ground.x.dtype)

    def _own_columns(self, blocks: Tensor) -> Tensor:
        """Without what fills up the last block."""
        own = self._mine.stop - self._mine.start
        return blocks.view(self.layer.outputs, self._width)[:, :own].reshape(-1)

    # -- the way back ---------------------------------------------------------------
    @property
    def _matrix(self) -> Tensor:
        return self.ground.x[self.bucket.part].view(self.layer.outputs, self.layer.inputs)

    def own(self) -> Tensor:
        """See :meth:`Piece.own`."""
        if self.ground.x.is_meta:
            return self.ground.x[: self.numel]
        return self._matrix[:, self._mine].clone(memory_format=torch.contiguous_format).view(-1)

    def gather(self, values: Tensor) -> None:
        """See :meth:`Piece.gather`."""
        self._sent.clear()
        filled = self.ground.weights.encode(values, self._message[: values.numel()])
        self._moving = self.ground.gather(self._message, self._gathered, filled)
        self.gathering = True

    def finish(self) -> None:
        """See :meth:`Piece.finish`."""
        if not self.gathering:
            return
        assert self._moving is not None
        self.ground.order.wait(self._moving)
        if not self.ground.x.is_meta:
            blocks, _ = self.ground.weights.fetch(self._gathered)
            for columns, block in zip(self._columns, blocks.view(self.ground.n, -1), strict=True):
                part = self._matrix[:, columns]
                part.copy_(block[: part.numel()].view(part.shape))
        self.gathering = False


class DenseBias(LayerPiece):
    """The bias of such a layer: updated in full by every rank, and never sent."""

    def __init__(self, ground: LayerContext, bucket: Bucket, weight: DenseWeight) -> None:
        super().__init__(ground, bucket)
        self.numel = bucket.numel
        self._weight = weight
        self._gradients = torch.empty(0)
        self._moving: Queued | None = None
        self._message = torch.empty(0)
        self._updated: Tensor | None = None

    def send(self, g: Tensor, share: float, loss_scale: float) -> None:
        """See :meth:`Piece.send`: the errors, which the weight sends, are enough."""
        if self._weight.by_errors:
            return
        wire = self.ground.wire
        values = g[self.bucket.part].to(wire.dtype, copy=True)
        scale(values, share)
        self._message, filled = wire.stage(values)
        self._gradients = wire.buffer(self.ground.n * self.numel)
        self._moving = self.ground.gather(self._message, self._gradients, filled)

    def summed(self) -> Tensor:
        """See :meth:`Piece.summed`; to be called after the weight's."""
        if self.ground.x.is_meta:
            return self.own()
        if self._weight.by_errors:
            return self._weight.bias_gradient()
        assert self._moving is not None
        self.ground.order.wait(self._moving)
        return self.ground.sum(self._gradients.view(self.ground.n, -1))

    def own(self) -> Tensor:
        """See :meth:`Piece.own`: all of it."""
        own = self.ground.x[self.bucket.part]
        return own if own.is_meta else own.clone()

    def gather(self, values: Tensor) -> None:
        """Everyone has it; it is stored when the others are."""
        self._updated = values
        self.gathering = True

    def finish(self) -> None:
        """See :meth:`Piece.finish`."""
        if self._updated is not None:
            copy(self.ground.x[self.bucket.part], self._updated)
        self._updated = None
        self.gathering = False
