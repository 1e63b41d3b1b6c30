"""Pieces of the flat vector: summed, updated and gathered as one, each rank its 1/n.

``dense_pieces.py`` has those of fully connected layers that exchange activations and errors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from aladdin_mpi.allreduce.in_order import InOrder, Queued
from aladdin_mpi.compression.codec import DenseWire
from aladdin_mpi.control.refusals import GradientCheck
from aladdin_mpi.model.layout import Bucket
from aladdin_mpi.model.vectors import copy, scale
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.request import Event


@dataclass(frozen=True)
class Ground:
    """What all pieces of a rank stand on.

    Attributes:
        x: the module's flat parameters.
        wire: for gradients, activations and errors.
        weights: for weights, which travel in full: every rank has to get the same.
        check: looks at what is sent in place of a gradient, and clears what is not finite.
    """

    transport: Transport
    order: InOrder
    x: Tensor
    wire: DenseWire
    weights: DenseWire
    check: GradientCheck

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


class Piece(ABC):
    """One piece, on one rank; ``numel`` is the length of the part that this rank updates."""

    numel: int

    def __init__(self, ground: Ground, bucket: Bucket) -> None:
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


class GradientPiece(Piece):
    """A bucket in n equal parts, the last of which may be filled up."""

    def __init__(self, ground: Ground, bucket: Bucket) -> None:
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
