"""The sum of compressed gradients by an all-gather (Lin et al., ICLR 2018)."""

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
    """Return the length of every rank's message, in values of the wire's dtype.

    It depends on the share of values that is sent at ``samples``, the same on all ranks.
    """
    head = index_values(codec.dtype)
    return head + -(-codec.longest(bucket, samples) // head) * head


def pack(codec: DeepGradientCompression, message: Tensor, part: Tensor) -> None:
    """Write ``message``, preceded by its length, into ``part``, which has the packed length."""
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
    """Compute ``target <- target + alpha * sum of the gradients`` in ``gathered``, in rank order.

    ``gathered`` holds ``parts`` packed messages about ``bucket``; ``codec`` is any rank's.
    """
    if target.is_meta:
        return
    head = index_values(codec.dtype)
    on_device, _ = codec.plain.fetch(gathered)
    for header, part in zip(gathered.view(parts, -1), on_device.view(parts, -1), strict=True):
        length = int(header[:head].view(index_dtype(codec.dtype)))
        codec.add(bucket, part[head : head + length], target, alpha)


IN_FLIGHT = 2
"""Largest number of collectives in flight. With 1 the links idle between the end on one rank and
the next start on another; with more, the first ones end later (docs/design/algorithm-choices.md).
"""


class InOrder:
    """A first-in, first-out queue of collectives.

    A collective whose buffer is still being filled blocks those after it. All ranks must enqueue
    the same ones in the same order, and may start no others at the same time.

    Args:
        most: largest number of collectives in flight; None: no limit.
    """

    def __init__(self, transport: Transport, most: int | None = IN_FLIGHT) -> None:
        self._transport = transport
        self._most = most
        self._held: deque[Queued] = deque()
        self._in_flight: list[Request] = []

    def put(self, start: Callable[[], Request], after: Event | None) -> Queued:
        """Enqueue ``start``; call it in turn, once the event ``after`` (if any) has occurred."""
        queued = Queued(start, after)
        with self._transport.atomic():
            self._held.append(queued)
            self._launch()
        if after is not None and queued.request is None:
            self._transport.when_done(after, self._launch)
        return queued

    def _launch(self) -> None:
        """Start as many as the limit allows. Any thread may call this after a collective's end."""
        # Atomic, so that no other thread starts the next collective before this one.
        with self._transport.atomic():
            self._in_flight = [request for request in self._in_flight if not request.done]
            while not self._is_full(self._in_flight) and self._held and self._held[0].is_ready:
                queued = self._held.popleft()
                queued.request = queued.start()
                if self._most is not None and not queued.request.done:
                    self._in_flight.append(queued.request)
                    self._transport.when_done(queued.request, self._launch)

    def _is_full(self, in_flight: list[Request]) -> bool:
        return self._most is not None and len(in_flight) >= self._most

    def wait(self, queued: Queued) -> bool:
        """Wait until a queued collective has ended; return whether it has.

        It has not if the group is revoked, and the wait may not raise an error.
        """
        self._launch()
        while queued.request is None:
            # Not started: other collectives or a copy from the GPU come first.
            in_flight = self._in_flight  # a handler may replace the list during the wait
            if self._is_full(in_flight):
                self._transport.wait_any(in_flight)
            else:
                self._transport.sleep(EVENT_POLL)
            if self._transport.is_revoked():
                self._transport.wait_any(())  # raises, if it may
                return False
            self._launch()
        self._transport.wait(queued.request)
        return queued.request.done


@dataclass(eq=False)
class Queued:
    """A collective in the queue."""

    start: Callable[[], Request]
    after: Event | None
    request: Request | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the collective's buffer is filled."""
        return self.after is None or self.after.query()


class CompressedAllReduce(AllReduce):
    """Sum of compressed slices, collected by the transport's all-gather.

    Args:
        layout: layout whose bucket indices are the keys.
        codec: this rank's codec, which keeps the residual.
        samples: returns the sample number at which the current gradients start.
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
        self._buffers: dict[int, _BucketBuffers] = {}

    def start(self, values: Tensor, key: int) -> PendingSum:
        """Start the sum; what is left out of ``values`` stays in the codec."""
        bucket, codec = self._layout.buckets[key], self._codec
        samples = self._samples()
        length = packed_length(codec, bucket, samples)
        buffers = self._buffers.get(key)
        if buffers is None or buffers.part.numel() != length:
            buffers = self._buffers[key] = _BucketBuffers(
                codec.buffer(bucket.numel),
                codec.plain.buffer(length),
                codec.plain.buffer(length * self._transport.size),
            )
        message, event = codec.compress(bucket, values, samples, buffers.message)

        def gather() -> Request:
            pack(codec, message, buffers.part)
            return self._transport.iallgather(buffers.part, buffers.gathered)

        queued = self._order.put(gather, event)

        def wait() -> Tensor:
            self._order.wait(queued)
            clear(values)
            add_packed(codec, bucket, buffers.gathered, self._transport.size, values)
            return values

        return PendingSum(wait)

    def describe(self) -> str:
        """Return a short description of the method."""
        return "all-gather of compressed gradients"


class _BucketBuffers(NamedTuple):
    """A bucket's buffers: its message, the message padded to the common length, and all ranks'."""

    message: Tensor
    part: Tensor
    gathered: Tensor
