"""The sum of compressed gradients: everyone gathers everyone's (Lin et al., ICLR 2018)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from aladdin_mpi.allreduce.base import AllReduce, Pending
from aladdin_mpi.compression.dgc import DeepGradientCompression
from aladdin_mpi.compression.equal_length import add_packed, pack, packed_length
from aladdin_mpi.model.layout import Bucket, Layout
from aladdin_mpi.model.vectors import clear
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.request import Request

if TYPE_CHECKING:
    from torch import Tensor


class CompressedAllReduce(AllReduce):
    """Compresses each slice and gathers all ranks' with the transport's all-gather.

    Args:
        transport: among whose ranks is summed.
        layout: whose buckets the keys are.
        codec: this rank's, with what it has not sent yet.
        samples: number of the run's sample that the current gradients start at; the same
            on all ranks.
    """

    name = "gather"

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        codec: DeepGradientCompression,
        samples: Callable[[], int],
    ) -> None:
        self._transport = transport
        self._layout = layout
        self._codec = codec
        self._samples = samples

    def start(self, values: Tensor, key: int) -> Pending:
        """See :meth:`AllReduce.start`; what is left out of ``values`` stays in the codec."""
        bucket, codec = self._layout.buckets[key], self._codec
        samples = self._samples()
        message, event = codec.compress(bucket, values, samples, codec.buffer(bucket.numel))
        while event is not None and not event.query():
            pass  # a copy of a few kilobytes from the GPU
        length = packed_length(codec, bucket, samples)
        part = codec.plain.buffer(length)
        pack(codec, message, part)
        gathered = codec.plain.buffer(length * self._transport.size)
        request = self._transport.iallgather(part, gathered)
        return _Gathering(self._transport, request, codec, bucket, gathered, values)

    def describe(self) -> str:
        """What does the work."""
        return "all-gather of compressed gradients"


class _Gathering(Pending):
    def __init__(
        self,
        transport: Transport,
        request: Request,
        codec: DeepGradientCompression,
        bucket: Bucket,
        gathered: Tensor,
        values: Tensor,
    ) -> None:
        self._transport = transport
        self._request = request
        self._codec = codec
        self._bucket = bucket
        self._gathered = gathered
        self._values = values

    def wait(self) -> Tensor:
        self._transport.wait(self._request)
        clear(self._values)
        add_packed(self._codec, self._bucket, self._gathered, self._transport.size, self._values)
        return self._values
