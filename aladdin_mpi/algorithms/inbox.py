"""A worker's way in: the newest global model of every bucket, without waiting for it."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from torch import Tensor

from aladdin_mpi.algorithms.frames import Header, Kind, new_header
from aladdin_mpi.compression.dense import DenseWire
from aladdin_mpi.layout import Bucket, Layout
from aladdin_mpi.tags import Tag
from aladdin_mpi.transport.base import Request, Transport
from aladdin_mpi.vectors import lerp


class Model(NamedTuple):
    """The global model's ``bucket``, to be blended in by ``alpha``."""

    bucket: Bucket
    values: Tensor
    alpha: float


class _Line:
    """The receives posted for one server: header, bucket, header, bucket, ..."""

    def __init__(self, transport: Transport, server: int, layout: Layout, wire: DenseWire) -> None:
        self._transport = transport
        self._server = server
        self._layout = layout
        self._posted: deque[tuple[Request, Request]] = deque()
        self.ended = False
        # A whole model can arrive while the worker computes.
        self._buffers = [
            (new_header(), wire.buffer(layout.largest)) for _ in layout.owned_by(server)
        ]

    def open(self) -> None:
        self.ended = False
        for header, values in self._buffers:
            self._post(header, values)

    def _post(self, header: Tensor, values: Tensor) -> None:
        post = self._transport.irecv
        self._posted.append(
            (post(header, self._server, Tag.MODEL), post(values, self._server, Tag.MODEL))
        )

    def arrived(self) -> list[Model]:
        """What has come, oldest first; to be given back by :meth:`repost`."""
        found: list[Model] = []
        while not self.ended and self._posted and self._transport.test(self._posted[0][0]):
            announced, data = self._posted[0]
            assert announced.buffer is not None and data.buffer is not None
            header = Header.unpack(announced.buffer)
            if header.kind == Kind.END:
                self._close()
            elif self._transport.test(data):
                self._posted.popleft()
                bucket = self._layout.buckets[header.bucket]
                found.append(Model(bucket, data.buffer[: bucket.numel], header.alpha))
            else:
                break
        return found

    def repost(self, count: int) -> None:
        """Post receives again for ``count`` models taken from :meth:`arrived`."""
        if not self.ended:
            for _ in range(count):
                self._buffers.append(self._buffers.pop(0))
                self._post(*self._buffers[-1])

    def _close(self) -> None:
        self.ended = True
        for pair in self._posted:
            for request in pair:
                if not request.done:
                    self._transport.cancel(request)
        self._posted.clear()

    def next(self) -> Request | None:
        """What a wait for the next arrival has to wait for."""
        if self.ended or not self._posted:
            return None
        announced, data = self._posted[0]
        if not announced.done:
            return announced
        assert announced.buffer is not None
        # Nothing follows the end, which may have come since the last look.
        ended = Header.unpack(announced.buffer).kind == Kind.END
        return announced if ended else data


class ModelInbox:
    """Receives posted ahead for the models that the servers send when they see fit."""

    def __init__(self, transport: Transport, layout: Layout, wire: DenseWire) -> None:
        self._transport = transport
        self._buckets = len(layout.buckets)
        self._lines = [_Line(transport, s, layout, wire) for s in range(layout.servers)]

    def open(self) -> None:
        """Post the receives; at the start of a segment."""
        for line in self._lines:
            line.open()

    def blend_into(self, parameters: Tensor) -> int:
        """``x <- (1 - alpha) x + alpha x~`` with the newest arrival of each bucket.

        Returns how many buckets have come.
        """
        count = 0
        for line in self._lines:
            arrived = line.arrived()
            newest = {model.bucket.index: model for model in arrived}
            for bucket, values, alpha in newest.values():
                lerp(parameters[bucket.part], values, alpha)
            line.repost(len(arrived))
            count += len(arrived)
        return count

    def await_into(self, parameters: Tensor) -> None:
        """Wait for a model from the servers, every bucket once, and blend it in."""
        missing = self._buckets
        while missing := missing - self.blend_into(parameters):
            self._wait()

    def drain_into(self, parameters: Tensor) -> None:
        """Blend what still comes until every server has said that it was all."""
        self.blend_into(parameters)
        while self._wait():
            self.blend_into(parameters)

    def _wait(self) -> bool:
        """Wait for the next message; whether one can come."""
        awaited = [request for line in self._lines if (request := line.next())]
        if awaited:
            self._transport.wait_any(awaited)
        return bool(awaited)
