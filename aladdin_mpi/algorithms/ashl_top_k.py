"""What a worker of ASHL pushes: the largest values of what it has moved."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.compression.codec import GradientCodec
from aladdin_mpi.compression.dgc import DeepGradientCompression
from aladdin_mpi.compression.few_bits import FewBitsCodec
from aladdin_mpi.model.layout import Bucket, Layout
from aladdin_mpi.transport.request import Event

SAMPLE = 0.01
"""Share of the values from which the smallest of the largest is estimated."""


class TopK(DeepGradientCompression):
    """``TopK(x - base, rate)``: of every bucket the largest values, at the present ``rate``.

    With a wire of few bits all values go in few bits where that is not longer than those
    chosen, which go in fp32 as their positions do. A message of those is given entries that
    add nothing where its length would say few bits.
    """

    def __init__(self, wire: GradientCodec, layout: Layout) -> None:
        everything = [(1, layout.numel)]
        super().__init__(wire.plain, layout, everything, lambda samples: self.rate, sample=SAMPLE)
        self.rate = 1.0
        self.few_bits = wire if isinstance(wire, FewBitsCodec) else None

    def discard(self) -> None:
        """Forget what was not chosen."""
        if self.left is not None:
            self.left.zero_()

    # -- sizes and memory ------------------------------------------------------
    def longest(self, bucket: Bucket, samples: int) -> int:
        """See :meth:`DeepGradientCompression.longest`."""
        return self._unlike_few_bits(bucket, super().longest(bucket, samples))

    def _unlike_few_bits(self, bucket: Bucket, length: int) -> int:
        while self.few_bits is not None and self.few_bits.reads(bucket, length):
            length += 2
        return length

    def _is_few_bits(self, bucket: Bucket, message: Tensor) -> bool:
        return self.few_bits is not None and self.few_bits.reads(bucket, message.numel())

    def buffer_for(self, vector: Tensor) -> Tensor:
        """See :meth:`GradientCodec.buffer_for`."""
        return (self.few_bits or self.plain).buffer_for(vector)

    def numbers(self, bucket: Bucket, message: Tensor) -> Tensor:
        """See :meth:`GradientCodec.numbers`."""
        if self.few_bits is not None and self._is_few_bits(bucket, message):
            return self.few_bits.numbers(bucket, message)
        return super().numbers(bucket, message)

    def besides(self, bucket: Bucket, nbytes: int) -> int:
        """See :meth:`GradientCodec.besides`."""
        few_bits = self.few_bits
        if few_bits is not None and few_bits.reads(bucket, nbytes // self.dtype.itemsize):
            return few_bits.besides(bucket, nbytes)
        return super().besides(bucket, nbytes)

    # -- sending and receiving -------------------------------------------------
    def compress(
        self, bucket: Bucket, values: Tensor, samples: int, room: Tensor
    ) -> tuple[Tensor, Event | None]:
        """See :meth:`GradientCodec.compress`."""
        few_bits = self.few_bits
        if few_bits is None or few_bits.length(bucket) > self.longest(bucket, samples):
            return super().compress(bucket, values, samples, room)
        if self.left is None:
            return few_bits.compress(bucket, values, samples, room)
        left = self.left[bucket.part].add_(values)
        sent = few_bits.compress(bucket, left, samples, room)
        left.zero_()
        return sent

    def _take_largest(self, bucket: Bucket, left: Tensor, samples: int) -> Tensor:
        message = super()._take_largest(bucket, left, samples)
        length = self._unlike_few_bits(bucket, message.numel())
        if length > message.numel():
            positions, values = message.chunk(2)
            nothing = message.new_zeros((length - message.numel()) // 2)
            message = torch.cat((positions, nothing, values, nothing))
        return message

    def add(self, bucket: Bucket, message: Tensor, target: Tensor, alpha: float = 1.0) -> None:
        """See :meth:`GradientCodec.add`."""
        if self.few_bits is not None and self._is_few_bits(bucket, message):
            self.few_bits.add(bucket, message, target, alpha)
        else:
            super().add(bucket, message, target, alpha)

    # -- checkpoints -----------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """What was not chosen, and what rounding has lost."""
        few_bits = self.few_bits.state_dict() if self.few_bits is not None else None
        return {**super().state_dict(), "few_bits": few_bits}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state from :meth:`state_dict`."""
        super().load_state_dict(state)
        if self.few_bits is not None:
            self.few_bits.load_state_dict(state["few_bits"])
