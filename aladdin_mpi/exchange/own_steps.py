"""A worker's own steps that the global model does not include yet, and their messages.

Every step is in exactly one place: in ``left``, which no message has carried; under way, in a
message that no received model includes; or in the global model. A worker's model is the latest
received global one, plus ``left``, plus the messages under way. These are stored as they were sent,
in less than two bits per value, so ``left`` is the only vector. Each bucket is treated as a
separate model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from aladdin_mpi.codec.sign_codec import SignCodec
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.exchange.server_mailbox import Header, Kind
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.flat.state import MEAN, Stateful, saved
from aladdin_mpi.flat.vectors import add, clear
from aladdin_mpi.transport.base import Request
from aladdin_mpi.worker.worker import Worker


@dataclass
class StepsMessage:
    """A message about all buckets.

    Attributes:
        number: own steps of the segment up to this message, as servers count them.
        at: time of sending, in seconds.
        parts: encoded values by bucket, without those that a received model includes.
        requests: sends in progress, in order.
    """

    number: int
    at: float
    parts: dict[int, Tensor] = field(default_factory=dict)
    requests: deque[Request] = field(default_factory=deque)


class OwnSteps(Stateful):
    """The worker's end of the account: what is left to send, and what is under way.

    ``steps`` counts the own steps of the segment until everything has been sent.
    """

    SAVED = saved(left="remaining", merge=MEAN)

    def __init__(self, worker: Worker, codec: SignCodec) -> None:
        self._worker = worker
        self._transport = worker.transport
        self._layout = worker.layout
        self._codec = codec
        self.left = worker.replica.new_vector()
        self.under_way: deque[StepsMessage] = deque()
        self.steps = 0
        self._announced = 0
        self._has_left = False
        """Whether ``left`` may be other than zero."""

    # -- checkpoints --------------------------------------------------------------------
    @property
    def remaining(self) -> Tensor | None:
        """``left``; None if it is zero, as between segments."""
        return self.left if self._has_left else None

    @remaining.setter
    def remaining(self, values: Tensor | None) -> None:
        self._has_left = values is not None
        if values is None:
            clear(self.left)
        else:
            self.left.copy_(values)

    # -- a segment ----------------------------------------------------------------------
    def open(self) -> None:
        """Start a segment: nothing is under way."""
        self.under_way.clear()
        self.steps = self._announced = 0

    def add(self, change: Tensor, alpha: float = 1.0) -> None:
        """Add ``alpha * change``, which the worker's model has just been changed by."""
        add(self.left, change, alpha)
        self._has_left = True

    def send(self, share: float) -> None:
        """Send the largest ``share`` of what is left, of every bucket."""
        message = self._begin((share,))
        for bucket in self._layout.buckets:
            encoded = self._codec.take(bucket.of(self.left), share)
            message.parts[bucket.index] = encoded
            self._put(message, bucket, encoded)
        self.under_way.append(message)

    def send_all(self) -> None:
        """Send everything that is left, exactly; wait until it is delivered, and end the segment.

        With a share of 0, servers send no answer.
        """
        requests = [request for message in self.under_way for request in message.requests]
        if self._has_left:  # also without a step: what it had when the group was formed
            last = self._begin((0.0,))
            for bucket in self._layout.buckets:
                self._put(last, bucket, bucket.of(self.left))
            requests += last.requests
            self._has_left = False  # if a failure interrupts the wait, servers have parts of it
        for server in range(self._layout.servers):
            end = Header(Kind.END).pack()
            requests.append(self._transport.isend(end, server, Tag.GRADIENT))
        self._transport.wait(*requests)
        self.remaining = None
        self.steps = self._announced = 0

    def _begin(self, notes: tuple[float, ...]) -> StepsMessage:
        """Return the next message after sending its headers."""
        steps, self._announced = self.steps - self._announced, self.steps
        header = Header(Kind.BUCKETS, steps, self._worker.lease.start, alpha=1.0, notes=notes)
        message = StepsMessage(self.steps, self._transport.now())
        for server in range(self._layout.servers):
            message.requests.append(self._transport.isend(header.pack(), server, Tag.GRADIENT))
        return message

    def _put(self, message: StepsMessage, bucket: Bucket, values: Tensor) -> None:
        staged, event = self._codec.plain.stage(values)
        send = self._transport.isend
        message.requests.append(send(staged, bucket.server, Tag.GRADIENT, after=event))

    # -- models -------------------------------------------------------------------------
    def confirm(self, bucket: Bucket, own: int) -> list[Tensor]:
        """Remove and return the parts of the messages up to number ``own``, now in the model."""
        parts = [
            message.parts.pop(bucket.index)
            for message in self.under_way
            if message.number <= own and bucket.index in message.parts
        ]
        while self.under_way and not self.under_way[0].parts:
            self._transport.wait(*self.under_way.popleft().requests)  # delivered, as answered
        return parts

    def parts_under_way(self, bucket: Bucket) -> Sequence[Tensor]:
        """Return the parts of all messages that the model of ``bucket`` does not include."""
        return [m.parts[bucket.index] for m in self.under_way if bucket.index in m.parts]
