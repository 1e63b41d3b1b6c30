"""A worker's mailbox: sends gradients and receives the newest models, without waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aladdin_mpi.codec.base import GradientCodec
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.exchange.server_mailbox import Header, Kind, Notes, is_damaged, new_header
from aladdin_mpi.flat.layout import Bucket, Layout
from aladdin_mpi.flat.state import DROPPED, HELD_BACK, TOTAL, Stateful, saved
from aladdin_mpi.flat.vectors import add, cut, lerp
from aladdin_mpi.transport.base import EVENT_POLL, Event, Request, Transport

NotesFor = Notes | Callable[[int], Notes]
"""Notes for all servers, or a function of the server, called at the time of sending."""


class Sent:
    """A gradient, or a sum of some, and its messages.

    Attributes:
        vector: its flat values; with a codec that holds values, those of the current gradient.
        wires: memory for the message about each bucket.
        first: number of the first gradient in it, counted from 1 in every segment.
        last: number of the last one.
        is_kept: whether it stays readable after it has been delivered.
    """

    def __init__(self, vector: Tensor, wires: Sequence[Tensor]) -> None:
        self.vector = vector
        self.wires = wires
        self.messages: list[Tensor] = []
        """The messages sent so far, in the order of the buckets."""
        self.events: list[Event | None] = []
        """Events after which these messages are complete."""
        self.first = self.last = 0
        self.samples = 0
        self.weight = 1.0
        self.notes: NotesFor = ()
        self.requests: deque[Request] = deque()
        """Requests of its messages that may not be complete, in sending order."""
        self.count = 0
        self.is_kept = False


class Outbox(Stateful):
    """A ring of gradients in flight to the servers.

    A gradient is sent bucket by bucket during backward, as long as fewer than ``ring`` are
    on the wire. Otherwise it is added to what waits for its turn: a gradient, which then counts
    as that many, or the residual of a codec that holds values. Gradients are written
    from autograd's tensors directly into the send buffers: with fp32 on a CPU there is no other
    copy. A sum is compressed when it is sent.

    ``coalesced`` counts the gradients that were added to another one.

    Args:
        ring: number of gradients on the wire at the same time.
        keep: number of sent ones that stay readable until :meth:`forget`.
    """

    SAVED = (
        saved("coalesced", merge=TOTAL)
        | saved(codec="_codec", merge=HELD_BACK)
        | saved("former", merge=DROPPED)
    )

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        codec: GradientCodec,
        new_vector: Callable[[], Tensor],
        ring: int,
        keep: int = 0,
    ) -> None:
        self._transport = transport
        self._layout = layout
        self._codec = codec
        self._ring = ring
        self._keep = keep
        self._new_vector = new_vector
        self._shared = new_vector() if codec.holds else None
        """The current gradient, which is free once it is encoded; None: each has its own memory."""
        self._free = [self._new_slot()]
        self._in_flight: list[Sent] = []
        self._kept: deque[Sent] = deque()
        self._waiting: Sent | None = None
        self._current: Sent | None = None
        self._is_sending = False
        self._begun = 0
        """Number of gradients in this segment."""
        self.coalesced = 0

    def _new_slot(self) -> Sent:
        vector = self._new_vector() if self._shared is None else self._shared
        return Sent(vector, self._codec.wires(vector, self._layout.buckets))

    def open(self) -> None:
        """Start a segment: number its gradients from 1, and keep only the last one before it."""
        self._begun = 0
        while len(self._kept) > 1:
            self._let_go()
        for slot in self._kept:
            slot.first = slot.last = 0

    def begin(
        self, samples: int, count: int = 1, notes: NotesFor | None = (), weight: float = 1.0
    ) -> Tensor:
        """Return a vector for the next ``count`` gradients, from sample ``samples`` on.

        Its contents are undefined. ``notes`` are sent with it, unless it is added to another one; a
        function is called for each server at the time of sending. None: :meth:`announce` is called
        with the notes before the first :meth:`put`. ``weight`` is its share of the round.
        """
        self._reclaim()
        # At most those kept, ring in flight, one that waits and this one.
        slot = self._current = self._free.pop() if self._free else self._new_slot()
        slot.count, slot.samples, slot.weight = count, samples, weight
        slot.first, slot.last = self._begun + 1, self._begun + count
        self._begun = slot.last
        slot.messages.clear()
        slot.events.clear()
        self._is_sending = self._waiting is None and len(self._in_flight) < self._ring
        if notes is not None:
            self.announce(notes)
        return slot.vector

    def announce(self, notes: NotesFor) -> None:
        """Send the current gradient's header with ``notes``, or keep them if it has to wait."""
        assert self._current is not None
        self._current.notes = notes
        if self._is_sending:
            self._announce(self._current)

    def put(self, bucket: Bucket) -> None:
        """Send a complete bucket of the current gradient, if the ring has a free place."""
        assert self._current is not None
        if self._is_sending:
            self._send(self._current, bucket)
        elif self._waiting is not None:
            self._advance()

    def idle_until(self) -> Sequence[Request] | None:
        """Return the sends one of which must end before :meth:`put` can act; None: it can now."""
        if self._is_sending:
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
        """Complete the current gradient."""
        slot, self._current = self._current, None
        assert slot is not None
        if self._is_sending:
            self._sent(slot)
        else:
            self._hold(slot)
        self._advance()

    def _hold(self, slot: Sent) -> None:
        """Add a gradient to what waits for its turn."""
        if self._shared is not None:
            for bucket in self._layout.buckets:
                self._codec.hold(bucket, bucket.of(self._shared))
        if self._waiting is None:
            self._waiting = slot
            return
        if self._shared is None:
            add(self._waiting.vector, slot.vector)
        self._waiting.count += slot.count
        self._waiting.last = slot.last
        self.coalesced += slot.count
        self._free.append(slot)

    def _sent(self, slot: Sent) -> None:
        self._in_flight.append(slot)
        if self._keep:
            slot.is_kept = True
            self._kept.append(slot)
            if len(self._kept) > self._keep:
                self._let_go()

    def drain(self) -> None:
        """Wait until everything is delivered."""
        while self._in_flight:
            self._transport.wait(*list(self._in_flight[0].requests))
            self._advance()

    def flush(self) -> None:
        """Wait until everything is delivered, then send the end marker to the servers."""
        self.drain()
        for server in range(self._layout.servers):
            self._transport.wait(self._header(server, Header(Kind.END)))

    def _advance(self) -> None:
        """Send the waiting gradient if the ring has a free place."""
        self._reclaim()
        # One can wait only while none is sent bucket by bucket, so none can overtake it.
        if self._waiting is not None and len(self._in_flight) < self._ring:
            slot, self._waiting = self._waiting, None
            self._announce(slot)
            for bucket in self._layout.buckets:
                self._send(slot, bucket, is_held=self._shared is not None)
            self._sent(slot)

    def _reclaim(self) -> None:
        has_room = False
        for slot in self._in_flight:
            # Completed requests are not polled again.
            while slot.requests and self._transport.test(slot.requests[0]):
                slot.requests.popleft()
            has_room = has_room or not slot.requests
        if has_room:
            self._free += [s for s in self._in_flight if not s.requests and not s.is_kept]
            self._in_flight = [slot for slot in self._in_flight if slot.requests]

    def _announce(self, slot: Sent) -> None:
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

    def _send(self, slot: Sent, bucket: Bucket, is_held: bool = False) -> None:
        values, wire = bucket.of(slot.vector), slot.wires[bucket.index]
        if is_held:
            values = torch.zeros_like(values)
        message, event = self._codec.compress(bucket, values, slot.samples, wire)
        slot.messages.append(message)
        slot.events.append(event)
        slot.requests.append(
            self._transport.isend(message, bucket.server, Tag.GRADIENT, after=event)
        )

    # -- what was sent ----------------------------------------------------------------------
    def after(self, own: int) -> tuple[Sent | None, list[Sent]]:
        """Return what includes the gradient ``own`` of this segment, and all later ones.

        These are complete between two gradients. The first is None before the first gradient of
        the run; if it is not kept any more, the oldest that is takes its place.
        """
        before: Sent | None = None
        later: list[Sent] = []
        for slot in self._kept:
            if slot.last <= own:
                before = slot
            else:
                later.append(slot)
        if before is None and later and later[0].first > own + 1:
            before = later.pop(0)
        return before, later if self._waiting is None else [*later, self._waiting]

    @property
    def newest(self) -> Sent | None:
        """The newest complete gradient, or its sum; None before the first one of the run."""
        return self._waiting or (self._kept[-1] if self._kept else None)

    def add(self, sent: Sent, bucket: Bucket, *targets: tuple[Tensor, float]) -> None:
        """Compute ``target <- target + factor * values`` for a bucket of what was sent or waits.

        ``targets`` are pairs of a target, as long as the bucket, and its factor.
        """
        if self._shared is not None and sent is not self._waiting:
            place = bucket.index
            message, _ = self._codec.plain.fetch(sent.messages[place], sent.events[place])
            self._codec.add_to(bucket, message, targets)
            return
        for target, factor in targets:
            if self._shared is not None:
                self._codec.add_held(bucket, target, factor)
            else:
                add(target, bucket.of(sent.vector), factor)

    def forget(self, own: int) -> None:
        """Discard what was sent before what includes the gradient ``own``."""
        while len(self._kept) > 1 and self._kept[1].last <= own:
            self._let_go()

    def _let_go(self) -> None:
        """Stop keeping the oldest."""
        slot = self._kept.popleft()
        slot.is_kept = False
        if slot not in self._in_flight:
            self._free.append(slot)

    @property
    def former(self) -> dict[str, Any] | None:
        """The last messages and their count, for a checkpoint between segments; None: not kept."""
        if not self._kept or self._kept[-1].vector.is_meta:
            return None
        last = self._kept[-1]
        return {"count": last.count, "messages": [each.clone() for each in last.messages]}

    @former.setter
    def former(self, saved: Mapping[str, Any] | None) -> None:
        while self._kept:
            self._let_go()
        if saved is None:
            return
        slot = self._free.pop() if self._free else self._new_slot()
        slot.messages = [
            cut(wire, 0, message.numel()).copy_(message)
            for wire, message in zip(slot.wires, saved["messages"], strict=True)
        ]
        slot.events = [None] * len(slot.messages)
        if self._shared is None:
            for bucket, message in zip(self._layout.buckets, slot.messages, strict=True):
                bucket.of(slot.vector).copy_(message)
        slot.count, slot.first, slot.last = saved["count"], 0, 0
        slot.is_kept = True
        self._kept.append(slot)

    def state_dict(self) -> dict[str, Any]:
        """Return the state; within a segment, gradients that wait are lost."""
        state = super().state_dict()
        if self._waiting is not None and self._shared is not None:
            state["codec"] = self._codec.state_without_held()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`; earlier versions had no ``former``."""
        super().load_state_dict({"former": None, **state})


class Model(NamedTuple):
    """A message about the global model's ``bucket``, to be blended in by ``alpha``."""

    bucket: Bucket
    message: Tensor
    alpha: float
    notes: tuple[float, ...]


class _Inbox:
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
        """Number of taken models whose memory a device still reads."""
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
        """Return the oldest header, which has arrived; it is decoded only once."""
        if self._oldest is None:
            self._oldest = Header.received(self._posted[0][0])
        return self._oldest

    def arrived(self) -> list[Model]:
        """Return arrived models, oldest first; return their buffers with :meth:`repost`."""
        with self._transport.atomic():  # a handler may post receives
            return self._take_arrived()

    def _take_arrived(self) -> list[Model]:
        models: list[Model] = []
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
                models.append(Model(bucket, message, header.alpha, header.notes))
            else:
                break
        return models

    def repost(self, count: int, after: Event | None = None) -> None:
        """Post receives again for ``count`` models taken from :meth:`arrived`.

        Args:
            count: number of models, those taken first.
            after: event of a device's reads of them.
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
        """Return the request to wait for until the next arrival; None if none can arrive."""
        if not self._posted:
            self._await_device()
        if self.ended or not self._posted:
            return None
        announced, data = self._posted[0]
        if not announced.done or announced.failed is not None:
            return announced
        # Nothing follows the end marker, which may have arrived since the last poll.
        ended = self._announced().kind == Kind.END
        return announced if ended else data


class ModelInbox:
    """Receives posted ahead for models, which servers send at any time.

    ``notes`` are the newest ones received. ``models`` is the number of whole models that can
    arrive while the worker computes.
    """

    puts_all = False
    """Whether :meth:`put` gets every arrival, in order; otherwise the newest of each bucket."""

    def __init__(
        self, transport: Transport, layout: Layout, codec: GradientCodec, models: int = 1
    ) -> None:
        self._transport = transport
        self._buckets = len(layout.buckets)
        self._wire = codec.plain
        self.notes: tuple[float, ...] = ()
        self._differences = codec.model_decoder()
        self._lines = [_Inbox(transport, s, layout, codec, models) for s in range(layout.servers)]

    def open(self) -> None:
        """Start a segment: post the receives."""
        if self._differences is not None:
            self._differences.forget()
        for line in self._lines:
            line.open()

    def blend_into(self, parameters: Tensor) -> int:
        """Compute ``x <- (1 - alpha) x + alpha x~`` with the newest arrival of each bucket.

        Returns the number of arrived buckets, including those damaged in transit, which are
        replaced by the next ones.
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
        """Blend in models; return the event, if any, after which their buffers are free."""
        event: Event | None = None
        models_of: dict[int, list[Model]] = {}
        for model in arrived:
            models_of.setdefault(model.bucket.index, []).append(model)
        for models in models_of.values():
            self.prepare(models[0].bucket)
            newest: tuple[Model, Tensor] | None = None
            for model in models:  # decoders need all of them, in order
                if self._is_damaged(model):
                    continue
                message, event = self._wire.fetch(model.message)
                read: Tensor | None = message
                if self._differences is not None:
                    read = self._differences.decode(model.bucket, message)
                if read is not None and self.puts_all:
                    self.put(parameters, model, read)
                elif read is not None:
                    newest = model, read
            if newest is not None:
                self.put(parameters, *newest)
        return event

    def prepare(self, bucket: Bucket) -> None:
        """Prepare for the values of a bucket, before they are decoded."""
        return

    def note(self, model: Model) -> None:
        """Record a model's arrival, with or without values."""
        self.notes = model.notes or self.notes

    def put(self, parameters: Tensor, model: Model, values: Tensor) -> None:
        """Blend in the newest ``values`` of one bucket."""
        lerp(model.bucket.of(parameters), values, model.alpha)

    def _is_damaged(self, model: Model) -> bool:
        """Return whether a model was damaged in transit; if so, request the whole bucket."""
        if not is_damaged(model.message):
            return False
        if self._differences is not None:
            self._differences.lost(model.bucket)
            index = torch.tensor([model.bucket.index])
            self._transport.isend(index, model.bucket.server, Tag.WHOLE)
        return True

    def await_into(self, parameters: Tensor) -> None:
        """Wait for every bucket of a model from the servers, and blend it in."""
        missing = self._buckets
        while missing := missing - self.blend_into(parameters):
            self.wait()

    def drain_into(self, parameters: Tensor) -> None:
        """Blend in models until every server has sent its end marker."""
        self.blend_into(parameters)
        while self.wait():
            self.blend_into(parameters)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the next message, up to ``timeout`` seconds; return whether one can arrive."""
        awaited = [request for line in self._lines if (request := line.next())]
        if awaited:
            self._transport.wait_any(awaited, timeout)
        return bool(awaited)
