"""The sum of compressed gradients: everyone gathers everyone's (Lin et al., ICLR 2018)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from aladdin_mpi.allreduce.base import AllReduce, Pending
from aladdin_mpi.allreduce.in_order import InOrder, Queued
from aladdin_mpi.compression.dgc import DeepGradientCompression
from aladdin_mpi.compression.equal_length import add_packed, pack, packed_length
from aladdin_mpi.model.layout import Bucket, Layout
from aladdin_mpi.model.vectors import clear
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.request import Request


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
        self._order = InOrder(transport, most=None)
        self._rooms: dict[int, _Room] = {}

    def start(self, values: Tensor, key: int) -> Pending:
        """See :meth:`AllReduce.start`; what is left out of ``values`` stays in the codec."""
        bucket, codec = self._layout.buckets[key], self._codec
        samples = self._samples()
        length = packed_length(codec, bucket, samples)
        room = self._rooms.get(key)
        if room is None or room.part.numel() != length:
            room = self._rooms[key] = _Room(codec, bucket, length, self._transport.size)
        message, event = codec.compress(bucket, values, samples, room.message)

        def gather() -> Request:
            pack(codec, message, room.part)
            return self._transport.iallgather(room.part, room.gathered)

        return _Gathering(self, self._order.put(gather, event), bucket, room.gathered, values)

    def finish(self, pending: _Gathering) -> Tensor:
        """Wait for everyone's message and add them."""
        self._order.wait(pending.queued)
        bucket, values = pending.bucket, pending.values
        clear(values)
        add_packed(self._codec, bucket, pending.gathered, self._transport.size, values)
        return values

    def describe(self) -> str:
        """What does the work."""
        return "all-gather of compressed gradients"


class _Room:
    """A bucket's memory: its message, that brought to everyone's length, and everyone's."""

    def __init__(
        self, codec: DeepGradientCompression, bucket: Bucket, length: int, ranks: int
    ) -> None:
        self.message = codec.buffer(bucket.numel)
        self.part = codec.plain.buffer(length)
        self.gathered = codec.plain.buffer(length * ranks)


class _Gathering(Pending):
    def __init__(
        self,
        owner: CompressedAllReduce,
        queued: Queued,
        bucket: Bucket,
        gathered: Tensor,
        values: Tensor,
    ) -> None:
        self.owner = owner
        self.queued = queued
        self.bucket = bucket
        self.gathered = gathered
        self.values = values

    def wait(self) -> Tensor:
        return self.owner.finish(self)
