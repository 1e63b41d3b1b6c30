"""A worker's messages: gradients out and the newest models in, without waiting for either."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from aladdin_mpi.codec.base import GradientCodec
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.exchange.server_mailbox import Header, Kind, Notes, is_damaged, new_header
from aladdin_mpi.flat.layout import Bucket, Layout
from aladdin_mpi.flat.state import HELD_BACK, TOTAL, Stateful, saved
from aladdin_mpi.flat.vectors import add, cut, lerp
from aladdin_mpi.transport.base import EVENT_POLL, Event, Request, Transport

NotesFor = Notes | Callable[[int], Notes]
"""For all servers, or for each as it is told."""


class _Slot:
    """One flat gradient and what is on its way of it."""

    def __init__(self, vector: Tensor, room: Tensor) -> None:
        self.vector = vector
        self.room = room
        self.count = 0
        self.samples = 0
        self.weight = 1.0
        self.notes: NotesFor = ()
        self.requests: deque[Request] = deque()
        """Of its messages, in the order of sending: those that may not have left."""


class Outbox(Stateful):
    """A ring of gradients in flight to the servers.

    A gradient leaves bucket by bucket while backward goes on, as long as fewer than
    ``ring`` are on the wire. Otherwise it is added to the one that waits for its
    turn, which then counts for that many. Gradients come straight from autograd's
    tensors into the buffers that are sent: with fp32 on a CPU there is no other copy.
    What is summed is compressed when its turn comes.

    ``coalesced`` counts the gradients that were added to another one.
    """

    SAVED = saved("coalesced", merge=TOTAL) | saved(codec="_codec", merge=HELD_BACK)

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        codec: GradientCodec,
        new_vector: Callable[[], Tensor],
        ring: int,
    ) -> None:
        self._transport = transport
        self._layout = layout
        self._codec = codec
        self._ring = ring
        self._new_vector = new_vector
        self._free = [self._new_slot()]
        self._in_flight: list[_Slot] = []
        self._waiting: _Slot | None = None
        self._current: _Slot | None = None
        self._live = False
        self.coalesced = 0

    def _new_slot(self) -> _Slot:
        vector = self._new_vector()
        return _Slot(vector, self._codec.buffer_for(vector))

    def begin(
        self, samples: int, count: int = 1, notes: NotesFor | None = (), weight: float = 1.0
    ) -> Tensor:
        """Return a vector for the next ``count`` gradients, from sample ``samples`` on.

        Its contents are undefined. ``notes`` are sent with it, unless it is added to another one;
        a function is called for those of each server when it leaves. None: :meth:`announce` is
        called with the notes before the first :meth:`put`. ``weight`` is its share of the round.
        """
        self._reclaim()
        # At most ring in flight, one that waits and this one.
        slot = self._current = self._free.pop() if self._free else self._new_slot()
        slot.count, slot.samples, slot.weight = count, samples, weight
        self._live = self._waiting is None and len(self._in_flight) < self._ring
        if notes is not None:
            self.announce(notes)
        return slot.vector

    def announce(self, notes: NotesFor) -> None:
        """Send the current gradient's header with ``notes``, or keep them if it has to wait."""
        assert self._current is not None
        self._current.notes = notes
        if self._live:
            self._announce(self._current)

    def put(self, bucket: Bucket) -> None:
        """The bucket of the current gradient is complete: send it, if its turn has come."""
        assert self._current is not None
        if self._live:
            self._send(self._current, bucket)
        elif self._waiting is not None:
            self._advance()

    def idle_until(self) -> Sequence[Request] | None:
        """The sends of which one has to end before :meth:`put` does anything; None: it does now."""
        if self._live:
            return None
        if self._waiting is None:
            return ()
        awaited = []
        for slot in self._in_flight:
            requests = slot.requests
            if not requests or requests[0].done:
                return None
            awaited.append(requests[0])
        return awaited

    def end(self) -> None:
        """The current gradient is complete."""
        slot, self._current = self._current, None
        assert slot is not None
        if self._live:
            self._in_flight.append(slot)
        elif self._waiting is None:
            self._waiting = slot
        else:
            add(self._waiting.vector, slot.vector)
            self._waiting.count += slot.count
            self.coalesced += slot.count
            self._free.append(slot)
        self._advance()

    def drain(self) -> None:
        """Wait until everything is delivered."""
        while self._in_flight:
            self._transport.wait(*list(self._in_flight[0].requests))
            self._advance()

    def flush(self) -> None:
        """Wait until everything is delivered, then tell the servers that this was all."""
        self.drain()
        for server in range(self._layout.servers):
            self._transport.wait(self._header(server, Header(Kind.END)))

    def _advance(self) -> None:
        """Send the one that waits, if there is room on the wire now."""
        self._reclaim()
        # One waits only while none is being sent bucket by bucket: none can cut in.
        if self._waiting is not None and len(self._in_flight) < self._ring:
            slot, self._waiting = self._waiting, None
            self._announce(slot)
            for bucket in self._layout.buckets:
                self._send(slot, bucket)
            self._in_flight.append(slot)

    def _reclaim(self) -> None:
        has_room = False
        for slot in self._in_flight:
            # What has left is not looked at again.
            while slot.requests and self._transport.test(slot.requests[0]):
                slot.requests.popleft()
            has_room = has_room or not slot.requests
        if has_room:
            self._free += [slot for slot in self._in_flight if not slot.requests]
            self._in_flight = [slot for slot in self._in_flight if slot.requests]

    def _announce(self, slot: _Slot) -> None:
        notes = slot.notes
        header = Header(
            Kind.BUCKETS,
            slot.count,
            slot.samples,
            alpha=slot.weight,
            notes=() if callable(notes) else notes,
        )
        for server in range(self._layout.servers):
            if callable(notes):
                header = header._replace(notes=notes(server))
            slot.requests.append(self._header(server, header))

    def _header(self, server: int, header: Header) -> Request:
        return self._transport.isend(header.pack(), server, Tag.GRADIENT)

    def _send(self, slot: _Slot, bucket: Bucket) -> None:
        values, room = bucket.of(slot.vector), bucket.of(slot.room)
        message, event = self._codec.compress(bucket, values, slot.samples, room)
        slot.requests.append(
            self._transport.isend(message, bucket.server, Tag.GRADIENT, after=event)
        )


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
        if not is_damaged(model.message):
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
