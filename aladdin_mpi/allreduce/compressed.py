"""The sum of compressed gradients: everyone gathers everyone's (Lin et al., ICLR 2018)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from aladdin_mpi.allreduce.base import AllReduce, PendingSum
from aladdin_mpi.codec.dgc import DeepGradientCompression, index_dtype, index_values
from aladdin_mpi.flat.layout import Bucket, Layout
from aladdin_mpi.flat.vectors import clear
from aladdin_mpi.transport.base import EVENT_POLL, Event, Request, Transport


def packed_length(codec: DeepGradientCompression, bucket: Bucket, samples: int) -> int:
    """Return the length of every rank's part, in values of the wire's dtype.

    It depends on the share of values that is sent at ``samples``, the same on all ranks.
    """
    head = index_values(codec.dtype)
    return head + -(-codec.longest(bucket, samples) // head) * head


def pack(codec: DeepGradientCompression, message: Tensor, part: Tensor) -> None:
    """Put ``message``, with its length in front, into ``part``, which has the packed length."""
    if message.is_meta or codec.plain.device.type == "meta":
        return
    head = index_values(codec.dtype)
    part[:head].view(index_dtype(codec.dtype)).fill_(message.numel())
    part[head : head + message.numel()] = message


def add_packed(
    codec: DeepGradientCompression,
    bucket: Bucket,
    gathered: Tensor,
    parts: int,
    target: Tensor,
    alpha: float = 1.0,
) -> None:
    """``target <- target + alpha * sum of the gradients`` in ``gathered``, in rank order.

    ``gathered`` holds ``parts`` packed messages about ``bucket``; ``codec`` is any rank's.
    """
    if target.is_meta:
        return
    head = index_values(codec.dtype)
    there, _ = codec.plain.fetch(gathered)
    for here, part in zip(gathered.view(parts, -1), there.view(parts, -1), strict=True):
        length = int(here[:head].view(index_dtype(codec.dtype)))
        codec.add(bucket, part[head : head + length], target, alpha)


UNDER_WAY = 2
"""Collectives under way at a time. With one the links idle from its end on one rank to the start
of the next on another; with more the first ones end later (docs/design/algorithm-choices.md)."""


class InOrder:
    """A queue of collectives: first in, first out.

    One whose buffer is still being filled holds up those behind. All ranks have to put the same
    ones in the same order, and may start no others meanwhile.

    Args:
        most: collectives under way at a time; None: as many as there are.
    """

    def __init__(self, transport: Transport, most: int | None = UNDER_WAY) -> None:
        self._transport = transport
        self._most = most
        self._held: deque[Queued] = deque()
        self._under_way: list[Request] = []

    def put(self, start: Callable[[], Request], after: Event | None) -> Queued:
        """Call ``start`` when its turn has come and ``after`` has happened, if there is one."""
        queued = Queued(start, after)
        with self._transport.atomic():
            self._held.append(queued)
            self._launch()
        if after is not None and queued.request is None:
            self._transport.when_done(after, self._launch)
        return queued

    def _launch(self) -> None:
        """Start as many as may be. Also called, by any thread, when one has ended."""
        # Whoever starts one: the next must not overtake it.
        with self._transport.atomic():
            self._under_way = [request for request in self._under_way if not request.done]
            while not self._are_most(self._under_way) and self._held and self._held[0].is_ready:
                queued = self._held.popleft()
                queued.request = queued.start()
                if self._most is not None and not queued.request.done:
                    self._under_way.append(queued.request)
                    self._transport.when_done(queued.request, self._launch)

    def _are_most(self, under_way: list[Request]) -> bool:
        return self._most is not None and len(under_way) >= self._most

    def wait(self, queued: Queued) -> None:
        """Wait until it has ended."""
        self._launch()
        while queued.request is None:
            # Not started: it is behind others, or behind a copy from the GPU.
            under_way = self._under_way  # which a handler may replace meanwhile
            if self._are_most(under_way):
                self._transport.wait_any(under_way)
            else:
                self._transport.sleep(EVENT_POLL)
            self._launch()
        self._transport.wait(queued.request)


@dataclass(eq=False)
class Queued:
    """A collective that has been put into the queue."""

    start: Callable[[], Request]
    after: Event | None
    request: Request | None = None

    @property
    def is_ready(self) -> bool:
        """Whether its buffer is filled."""
        return self.after is None or self.after.query()


class CompressedAllReduce(AllReduce):
    """Compresses each slice and gathers all ranks' with the transport's all-gather.

    Args:
        layout: whose buckets the keys are.
        codec: this rank's, with what it has not sent yet.
        samples: returns the number of the run's sample that the current gradients start at.
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
        self._rooms: dict[int, _BucketBuffers] = {}

    def start(self, values: Tensor, key: int) -> PendingSum:
        """See :meth:`AllReduce.start`; what is left out of ``values`` stays in the codec."""
        bucket, codec = self._layout.buckets[key], self._codec
        samples = self._samples()
        length = packed_length(codec, bucket, samples)
        room = self._rooms.get(key)
        if room is None or room.part.numel() != length:
            room = self._rooms[key] = _BucketBuffers(
                codec.buffer(bucket.numel),
                codec.plain.buffer(length),
                codec.plain.buffer(length * self._transport.size),
            )
        message, event = codec.compress(bucket, values, samples, room.message)

        def gather() -> Request:
            pack(codec, message, room.part)
            return self._transport.iallgather(room.part, room.gathered)

        queued = self._order.put(gather, event)

        def wait() -> Tensor:
            self._order.wait(queued)
            clear(values)
            add_packed(codec, bucket, room.gathered, self._transport.size, values)
            return values

        return PendingSum(wait)

    def describe(self) -> str:
        """See :meth:`AllReduce.describe`."""
        return "all-gather of compressed gradients"


class _BucketBuffers(NamedTuple):
    """A bucket's memory: its message, that brought to everyone's length, and everyone's."""

    message: Tensor
    part: Tensor
    gathered: Tensor
