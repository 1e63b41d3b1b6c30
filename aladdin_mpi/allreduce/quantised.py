"""The sum of quantised values: a reduce-scatter and an all-gather of messages between ranks.

Each rank owns a part of every bucket. It receives that part, quantised, from every other rank,
adds these and its own values in fp32, quantises the sum, and sends it to all. Both roundings have
error feedback (Seide et al., Interspeech 2014): the error of a part that is sent stays with the
sender, that of a sum with the owner. A rank's own values of its part are not rounded, so one flat
residual holds both. The applied sums plus all ranks' residuals equal the sum of all values.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from aladdin_mpi.allreduce.base import PendingSum
from aladdin_mpi.allreduce.messages import (
    MessageAllReduce,
    describe,
    divide,
    peers_of,
    swap,
    tag_of,
)
from aladdin_mpi.codec.quantise import Scratch, add_message, message_length, take
from aladdin_mpi.codec.quantised import QuantisedCodec
from aladdin_mpi.codec.scaled import on_device_of
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.transport.base import Event, Transport
from aladdin_mpi.transport.collectives import Steps


class QuantisedAllReduce(MessageAllReduce):
    """Sum of quantised slices, bit-identical on all ranks, as all decode the same messages.

    Args:
        codec: this rank's codec, which keeps the residual.
        buckets: buckets whose indices are the keys.
    """

    name = "quantised"

    def __init__(
        self, transport: Transport, codec: QuantisedCodec, buckets: Sequence[Bucket]
    ) -> None:
        super().__init__(transport)
        self._codec = codec
        self._buckets = buckets
        self._exchanges: dict[int, _Exchange] = {}

    def start(self, values: Tensor, key: int) -> PendingSum:
        """Quantise the other ranks' parts and start to send them."""
        self._check()
        exchange = self._exchanges.get(key)
        if exchange is None:
            made = _Exchange(self._transport, self._codec, self._buckets[key], tag_of(key))
            exchange = self._exchanges[key] = made
        event = exchange.load(values)
        return self._begin(exchange.steps(), event, lambda: exchange.store(values))

    def describe(self) -> str:
        """Return the network and the number of bits."""
        return describe(self._transport, f"messages of {self._codec.bits} bits, added in float32")


class _Exchange:
    """The messages about one bucket, in memory that the transport can use.

    Attributes:
        parts: each rank's part of the bucket.
        sent: messages about all parts, in rank order; in this rank's place its own values, to
            which those of the others are added.
        received: messages about this rank's part, a row for each of the other ranks, ``peers``.
        gathered: messages about the sums of all parts, in rank order.
        error: rounding error of the sum of this rank's part.
    """

    def __init__(
        self, transport: Transport, codec: QuantisedCodec, bucket: Bucket, tag: int
    ) -> None:
        rank, ranks = transport.rank, transport.size
        self.transport = transport
        self.codec = codec
        self.bucket = bucket
        self.tag = tag
        self.is_real = False
        self.parts = divide(bucket.numel, ranks)
        self.peers = peers_of(transport)
        sizes = [part.stop - part.start for part in self.parts]
        lengths = [message_length(size, codec.bits) for size in sizes]
        buffer = codec.plain.buffer
        self.received = buffer(lengths[rank] * (ranks - 1)).view(ranks - 1, lengths[rank])
        self.gathered, self.sums = buffer(sum(lengths)), _in_turn(lengths)
        lengths[rank] = sizes[rank]
        self.sent, self.messages = buffer(sum(lengths)), _in_turn(lengths)
        self.error = buffer(sizes[rank])
        self._scratch = Scratch()  # of the thread that handles messages

    def load(self, values: Tensor) -> Event | None:
        """Quantise ``values`` plus the residual; return the event after which to send them."""
        self.is_real = not values.is_meta
        if not self.is_real:
            return None
        sent, left = on_device_of(self.sent, values), self._left(values)
        for rank, (part, place) in enumerate(zip(self.parts, self.messages, strict=True)):
            if rank == self.transport.rank:
                torch.add(values[part], left[part], out=sent[place])
            else:
                take(values[part], left[part], sent[place], self.codec.bits, self.codec.scratch)
        return self.codec.plain.stage(sent, self.sent)[1]

    def _left(self, values: Tensor) -> Tensor:
        return self.codec.residual.on(values.device)[self.bucket.part]

    def steps(self) -> Steps:
        """Exchange the parts, add this rank's, and send the sum to all."""
        transport, tag = self.transport, self.tag
        mine = self.gathered[self.sums[transport.rank]]
        rows = zip(self.peers, self.received, strict=True)
        parts = ((peer, row, self.sent[self.messages[peer]]) for peer, row in rows)
        yield swap(transport, tag, parts)  # only what is yielded can be abandoned
        self.add()
        sums = ((peer, self.gathered[self.sums[peer]], mine) for peer in self.peers)
        yield swap(transport, tag, sums)

    def add(self) -> None:
        """Add all ranks' values of this rank's part, in a fixed order, and quantise the sum."""
        if not self.is_real:
            return
        rank = self.transport.rank
        total = self.sent[self.messages[rank]]
        for message in self.received:
            add_message(message, total, self._scratch)
        self.error.zero_()
        message = self.gathered[self.sums[rank]]
        take(total, self.error, message, self.codec.bits, self._scratch)

    def store(self, values: Tensor) -> Tensor:
        """Write the sum into ``values``, and the error of this rank's part into the residual."""
        if not self.is_real:
            return values
        left = self._left(values)[self.parts[self.transport.rank]]
        left.copy_(self.error, non_blocking=True)
        gathered, _ = self.codec.plain.fetch(self.gathered)
        totals = torch.zeros_like(values, dtype=torch.float32)
        for part, place in zip(self.parts, self.sums, strict=True):
            add_message(gathered[place], totals[part], self.codec.scratch)
        return values.copy_(totals)


def _in_turn(lengths: Sequence[int]) -> list[slice]:
    """Return consecutive slices of these lengths."""
    return [slice(start, stop) for start, stop in pairwise([0, *accumulate(lengths)])]
