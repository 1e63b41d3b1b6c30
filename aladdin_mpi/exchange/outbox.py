"""A worker's way out: it never waits, and no gradient is lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from aladdin_mpi.codec.base import GradientCodec
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.exchange.receiver import Header, Kind
from aladdin_mpi.flat.layout import Bucket, Layout
from aladdin_mpi.flat.state import Stateful, saved
from aladdin_mpi.flat.vectors import add
from aladdin_mpi.transport.base import Request, Transport
from aladdin_mpi.worker.merged_state import MergedState
from aladdin_mpi.worker.worker import Worker

Notes = tuple[float, ...]
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

    SAVED = saved("coalesced", codec="_codec")

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

    def resize(self, merged: MergedState, worker: Worker) -> None:
        """Go on with what other numbers of workers have held back, in the mean."""
        self.coalesced = int(merged.carried("coalesced", worker.index, worker.count))
        self._codec.load_state_dict(merged.worker["outbox"]["codec"])
