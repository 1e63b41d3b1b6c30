"""A worker's way in: the newest global model of every bucket, without waiting for it."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from aladdin_mpi.codec.base import GradientCodec
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.exchange.receiver import Header, Kind, new_header
from aladdin_mpi.flat.layout import Bucket, Layout
from aladdin_mpi.flat.vectors import cut, lerp
from aladdin_mpi.transport.base import EVENT_POLL, Event, Request, Transport
from aladdin_mpi.transport.checksums import is_void


class Model(NamedTuple):
    """A message about the global model's ``bucket``, to be blended in by ``alpha``."""

    bucket: Bucket
    message: Tensor
    alpha: float
    notes: tuple[float, ...]


class _Line:
    """The receives posted for one server: header, bucket, header, bucket, ..."""

    def __init__(
        self, transport: Transport, server: int, layout: Layout, codec: GradientCodec, models: int
    ) -> None:
        self._transport = transport
        self._server = server
        self._layout = layout
        self._posted: deque[tuple[Request, Request]] = deque()
        self._oldest: Header | None = None
        self._held = 0
        """Models taken whose memory a device still reads."""
        self.ended = False
        self._buffers = [
            (new_header(), codec.buffer(layout.largest))
            for _ in range(models)
            for _ in layout.owned_by(server)
        ]

    def open(self) -> None:
        self._await_device()
        self.ended = False
        for header, values in self._buffers:
            self._post(header, values)

    def _post(self, header: Tensor, values: Tensor) -> None:
        post = self._transport.irecv
        self._posted.append(
            (post(header, self._server, Tag.MODEL), post(values, self._server, Tag.MODEL))
        )

    def _announced(self) -> Header:
        """What the oldest header says, which has come: read once, however often it is asked for."""
        if self._oldest is None:
            self._oldest = Header.received(self._posted[0][0])
        return self._oldest

    def arrived(self) -> list[Model]:
        """What has come, oldest first; to be given back by :meth:`repost`."""
        with self._transport.atomic():  # receives may be posted by a handler
            return self._take_arrived()

    def _take_arrived(self) -> list[Model]:
        found: list[Model] = []
        while not self.ended and self._posted and self._transport.test(self._posted[0][0]):
            data = self._posted[0][1]
            header = self._announced()
            if header.kind == Kind.END:
                self._close()
            elif self._transport.test(data):
                self._posted.popleft()
                self._oldest = None
                bucket = self._layout.buckets[header.bucket]
                assert data.buffer is not None
                message = cut(data.buffer, 0, data.nbytes // data.buffer.itemsize)
                found.append(Model(bucket, message, header.alpha, header.notes))
            else:
                break
        return found

    def repost(self, count: int, after: Event | None = None) -> None:
        """Post receives again for ``count`` models taken from :meth:`arrived`.

        Args:
            count: of those taken first.
            after: a device reads them until then.
        """
        if after is None or after.query():
            with self._transport.atomic():
                self._repost(count)
        else:
            with self._transport.atomic():
                self._held += count
            self._transport.when_done(after, partial(self._release, count))

    def _release(self, count: int) -> None:
        self._held -= count
        self._repost(count)

    def _repost(self, count: int) -> None:
        if not self.ended:
            for _ in range(count):
                self._buffers.append(self._buffers.pop(0))
                self._post(*self._buffers[-1])

    def _await_device(self) -> None:
        while self._held:
            self._transport.sleep(EVENT_POLL)

    def _close(self) -> None:
        self.ended = True
        for pair in self._posted:
            for request in pair:
                if not request.done:
                    self._transport.cancel(request)
        self._posted.clear()
        self._oldest = None

    def next(self) -> Request | None:
        """What a wait for the next arrival has to wait for."""
        if not self._posted:
            self._await_device()
        if self.ended or not self._posted:
            return None
        announced, data = self._posted[0]
        if not announced.done or announced.failed is not None:
            return announced
        # Nothing follows the end, which may have come since the last look.
        ended = self._announced().kind == Kind.END
        return announced if ended else data


class ModelInbox:
    """Receives posted ahead for the models that the servers send when they see fit.

    ``notes`` are those of the newest model that came with any. ``models`` is how many whole
    models can arrive while the worker computes.
    """

    def __init__(
        self, transport: Transport, layout: Layout, codec: GradientCodec, models: int = 1
    ) -> None:
        self._transport = transport
        self._buckets = len(layout.buckets)
        self._wire = codec.plain
        self.notes: tuple[float, ...] = ()
        self._differences = codec.model_decoder()
        self._lines = [_Line(transport, s, layout, codec, models) for s in range(layout.servers)]

    def open(self) -> None:
        """Post the receives; at the start of a segment."""
        if self._differences is not None:
            self._differences.forget()
        for line in self._lines:
            line.open()

    def blend_into(self, parameters: Tensor) -> int:
        """``x <- (1 - alpha) x + alpha x~`` with the newest arrival of each bucket.

        Returns how many buckets have come, those among them that were damaged on their way:
        these are not taken, the next ones are.
        """
        count = 0
        for line in self._lines:
            arrived = line.arrived()
            for model in arrived:
                self.note(model)
            event = None if parameters.is_meta else self._blend(arrived, parameters)
            if arrived:
                line.repost(len(arrived), event)
            count += len(arrived)
        return count

    def _blend(self, arrived: list[Model], parameters: Tensor) -> Event | None:
        """Blend in; until the event that is returned, if any, a device reads the messages."""
        event: Event | None = None
        newest: dict[int, tuple[Model, Tensor]] = {}
        for model in arrived:  # every one, in their order
            if self._is_damaged(model):
                continue
            message, event = self._wire.fetch(model.message)
            read: Tensor | None = message
            if self._differences is not None:
                read = self._differences.decode(model.bucket, message)
            if read is not None:
                newest[model.bucket.index] = model, read
        for model, read in newest.values():
            self.put(parameters, model, read)
        return event

    def note(self, model: Model) -> None:
        """A model has come, with or without values."""
        self.notes = model.notes or self.notes

    def put(self, parameters: Tensor, model: Model, values: Tensor) -> None:
        """Blend in one bucket, of which ``values`` are the newest."""
        lerp(model.bucket.of(parameters), values, model.alpha)

    def _is_damaged(self, model: Model) -> bool:
        """Whether it was damaged on its way; then its server is asked for the whole bucket."""
        if not is_void(model.message):
            return False
        if self._differences is not None:
            self._differences.lost(model.bucket)
            index = torch.tensor([model.bucket.index])
            self._transport.isend(index, model.bucket.server, Tag.WHOLE)
        return True

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
