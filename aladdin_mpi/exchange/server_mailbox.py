"""A server's mailbox: receives each worker's gradients in order, sends models without waiting."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from math import isnan
from typing import NamedTuple

import torch
from torch import Tensor

from aladdin_mpi.codec.base import GradientCodec
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.errors import PeerFailedError
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.flat.vectors import add, cut, full, is_finite
from aladdin_mpi.transport.base import Event, Request, Transport, WaitSet, charge_memory, numbers_of
from aladdin_mpi.transport.checksums import intact, is_void

MOST_NOTES = 8
"""Largest number of notes in a header, unless a server expects more."""


class Kind(IntEnum):
    """The type of a header."""

    BUCKETS = 1
    END = 2


class Header(NamedTuple):
    """Announcement of buckets, or of the end of its sender's messages.

    For gradients: ``gradients`` gradients are summed into one, computed from sample number
    ``samples`` of the run on, with the weight ``alpha`` in their round. For models: ``bucket``
    follows, to be blended in by ``alpha``. ``notes`` are an algorithm's additions, usually at most
    ``MOST_NOTES`` numbers.
    """

    kind: int
    gradients: int = 0
    samples: int = 0
    bucket: int = -1
    alpha: float = 0.0
    notes: tuple[float, ...] = ()

    def pack(self) -> tuple[float, ...]:
        """Return the header as the numbers of a message."""
        return (*self[:-1], *self.notes)

    @staticmethod
    def unpack(numbers: Sequence[float]) -> Header:
        """Return the header from the numbers of :meth:`pack`."""
        kind, gradients, samples, bucket, alpha, *notes = numbers
        return Header(int(kind), int(gradients), int(samples), int(bucket), alpha, tuple(notes))

    @staticmethod
    def received(request: Request) -> Header:
        """Return the header from a completed receive into a :func:`new_header`.

        Raises:
            TransportError: the message was damaged in transit.
        """
        numbers = numbers_of(request) if request.numbers is None else request.numbers
        if isnan(numbers[0]):  # like all numbers of a void message
            assert request.buffer is not None
            intact(request.buffer[: len(numbers)], request.source)
        return Header.unpack(numbers)


def new_header(notes: int = 0) -> Tensor:
    """Return a buffer to receive a header with up to ``notes`` notes."""
    return torch.empty(len(Header._fields) - 1 + max(notes, MOST_NOTES), dtype=torch.float64)


def is_damaged(message: Tensor) -> bool:
    """Return whether ``message`` was damaged in transit, see :func:`is_void`.

    A damaged message starts with NaN, and hardly any other does, so usually one value is read.
    """
    is_suspect = not message.is_meta and message.numel() > 0 and isnan(message[0].item())
    return is_suspect and is_void(message)


TAKEN = 5
"""Bytes moved in memory for each received byte: copying (2) and adding (3)."""
RECEIVES_AHEAD = 8
"""Number of receives posted for each worker."""


@dataclass(slots=True)
class ReceivedBucket:
    """One bucket of a worker's gradient.

    The message is valid until the next arrival is requested, or indefinitely after
    :meth:`exchange` if it is dense. ``count`` gradients are summed in it.
    ``worker`` counts from 0.

    Attributes:
        storage: holds the message, and is large enough for the bucket's values.
        codec: reads the message; None: it is dense.
        length: length of the message, in values of the wire's dtype; None: the bucket's.
        notes: notes of the gradient's header.
        weight: the gradient's share of its round; the mean share is 1.
        refused: it was damaged in transit or not finite, and contains zeros now: neutral for
            gradients and differences, but not for a model.
    """

    worker: int
    bucket: Bucket
    count: int
    storage: Tensor
    codec: GradientCodec | None = None
    length: int | None = None
    notes: tuple[float, ...] = ()
    refused: bool = False
    weight: float = 1.0

    @property
    def is_dense(self) -> bool:
        """Whether the message consists of the bucket's plain values."""
        return self.codec is None or self.length == self.bucket.numel

    @property
    def nbytes(self) -> int:
        """Size of the message."""
        length = self.bucket.numel if self.length is None else self.length
        return length * self.storage.itemsize

    @property
    def values(self) -> Tensor:
        """The gradient, of the bucket's length; a copy unless :attr:`is_dense`."""
        values = cut(self.storage, 0, self.bucket.numel)
        if self.is_dense:
            return values
        values = torch.zeros_like(values, dtype=full(values.dtype))
        self.add_to(values)
        return values

    def add_to(self, target: Tensor, alpha: float = 1.0) -> None:
        """Add ``alpha`` times the gradient to ``target``, at a cost proportional to the message."""
        if target.is_meta:
            return
        if self.codec is None or self.is_dense:
            add(target, self.values, alpha)
        else:
            self.codec.add(self.bucket, self.storage[: self.length], target, alpha)

    @property
    def is_finite(self) -> bool:
        """Whether all values in the message are finite; reads them once."""
        if self.codec is None or self.is_dense:
            return is_finite(self.values)
        return is_finite(self.codec.numbers(self.bucket, self.storage[: self.length]))

    def refuse(self) -> None:
        """Replace the message by zeros."""
        self.refused = True
        self.storage[: self.length].zero_()

    def exchange(self, storage: Tensor) -> Tensor:
        """Keep the received storage and provide another for later receives, without a copy."""
        self.storage, mine = storage, self.storage
        return mine


class GradientReceiver:
    """The gradients of one worker: receives posted in its sending order.

    The order is known, a header and then this server's buckets, so every receive is
    posted for a specific message.
    """

    def __init__(
        self,
        transport: Transport,
        source: int,
        buckets: tuple[Bucket, ...],
        largest: int,
        codec: GradientCodec,
        notes: int,
    ) -> None:
        self._transport = transport
        self._source = source
        self._notes = notes
        self._buckets = buckets
        self._codec = codec
        self._storages = [codec.buffer(largest) for _ in range(RECEIVES_AHEAD)]
        self._headers: list[Tensor] = []
        self._posted: deque[tuple[Request, Tensor | None]] = deque()
        self._post_next = 0
        self._take_next = 0
        self.header = Header(Kind.END)
        self.ended = True

    def open(self) -> None:
        """Start a segment: post the first receives."""
        self._post_next = self._take_next = 0
        self.ended = False
        for _ in range(RECEIVES_AHEAD):
            self._post()

    @property
    def head(self) -> Request:
        """The receive of the next message."""
        return self._posted[0][0]

    def _post(self) -> None:
        turn = self._post_next % (1 + len(self._buckets))
        self._post_next += 1
        if turn == 0:
            buffer = self._headers.pop() if self._headers else new_header(self._notes)
            storage = None
        else:
            storage = self._storages.pop()
            buffer = cut(storage, 0, self._buckets[turn - 1].numel)
        request = self._transport.irecv(buffer, self._source, Tag.GRADIENT)
        self._posted.append((request, storage))

    def take(self, worker: int) -> ReceivedBucket | None:
        """Return the message at the head: a bucket, or None for a header."""
        request, storage = self._posted.popleft()
        turn = self._take_next % (1 + len(self._buckets))
        self._take_next += 1
        if storage is None:
            self.header = Header.received(request)
            assert request.buffer is not None
            self._headers.append(request.buffer)
            self.ended = self.header.kind == Kind.END
            if not self.ended:
                self._post()
            return None
        bucket, header = self._buckets[turn - 1], self.header
        return ReceivedBucket(
            worker,
            bucket,
            header.gradients,
            storage,
            self._codec,
            length=request.nbytes // storage.itemsize,
            notes=header.notes,
            weight=header.alpha,
        )

    def give_back(self, arrival: ReceivedBucket) -> None:
        """Reuse the arrival's storage for the next receive."""
        self._storages.append(arrival.storage)
        self._post()

    def close(self) -> None:
        """Cancel the receives after the worker's last message."""
        self.ended = True
        for request, storage in self._posted:
            self._transport.cancel(request)
            # A message from a failed rank may still be written into the buffer.
            if storage is not None and request.failed is None:
                self._storages.append(storage)
        self._posted.clear()


Notes = tuple[float, ...]
NotesThen = Notes | Callable[[], Notes]
"""Notes, or a function that makes them when the model is sent, which may be later."""
SENT = 2
"""Bytes moved in memory for each byte sent, by a copy."""


class ModelSender:
    """Models in flight to the workers, each copied at the time of sending.

    At most one message for each bucket and worker is in flight; a newer model waits and
    replaces any that waited before.
    """

    def __init__(self, transport: Transport, codec: GradientCodec, largest: int) -> None:
        self._transport = transport
        self._codec = codec
        self._wire = codec.plain
        self._differences = codec.model_encoder()
        self._largest = largest
        self._free: list[Tensor] = []
        self._in_flight: dict[tuple[int, int], tuple[Request, Tensor]] = {}
        self._newer: dict[tuple[int, int], tuple[Bucket, Tensor, float, NotesThen]] = {}
        self._turns: dict[tuple[int, int], int] = {}
        """Order in which the models in ``_newer`` began to wait."""
        self._turn = 0
        self._waiting: Counter[int] = Counter()
        """Number of models in ``_newer`` for each rank."""
        self._changed: set[tuple[int, int]] = set()
        """Keys whose waiting state has changed since the last :meth:`keep_up`."""
        self._ending: list[int] = []
        self._awaited: set[int] = set()

    def open(self) -> None:
        """Start a segment, whose first models are sent in full."""
        if self._differences is not None:
            self._differences.forget()

    def use(self, rank: int, level: float) -> None:
        """Send a worker's models at a level, if the codec has a choice: bits, or a share."""
        if self._differences is not None:
            self._differences.use(rank, level)

    def adopt(self, rank: int, bucket: Bucket, values: Tensor) -> None:
        """Record that a worker has ``values`` of a bucket."""
        if self._differences is not None:
            self._differences.adopt(rank, bucket, values)

    def forget(self, rank: int, bucket: Bucket) -> None:
        """Send a bucket in full next time."""
        if self._differences is not None:
            self._differences.lost(rank, bucket.index)

    def lost(self, source: int, message: Tensor) -> None:
        """Send a bucket in full next time, as a worker has not received a difference."""
        if self._differences is not None:
            self._differences.lost(source, int(message.view(torch.int64)))

    def note(self, arrival: ReceivedBucket) -> None:
        """Record a gradient, which will change the model."""
        if self._differences is not None and arrival.length is not None:
            bucket = arrival.bucket
            self._differences.touch(bucket, self._codec.selected(bucket, arrival.length))

    def send(
        self,
        rank: int,
        bucket: Bucket,
        values: Tensor,
        alpha: float,
        notes: NotesThen = (),
        exact: bool = False,
    ) -> None:
        """Send a bucket's ``values``, or queue them if the last ones are in flight.

        ``exact``: send the current values, even later; otherwise those at the time of sending.
        """
        if rank in self._transport.failed:
            return
        key = (rank, bucket.index)
        if key in self._in_flight and not self._reclaim(key):
            self._queue(key, (bucket, values.clone() if exact else values, alpha, notes))
            return
        self._dequeue(key)
        wire = self._free.pop() if self._free else self._wire.buffer(self._largest)
        message, event = self._write(rank, bucket, values, wire)
        charge_memory(self._transport, self._moved(bucket, message.nbytes))
        sent_notes = notes() if callable(notes) else notes
        header = Header(Kind.BUCKETS, bucket=bucket.index, alpha=alpha, notes=sent_notes)
        self._transport.isend(header.pack(), rank, Tag.MODEL)
        request = self._transport.isend(message, rank, Tag.MODEL, after=event)
        self._in_flight[key] = (request, wire)

    def _queue(self, key: tuple[int, int], model: tuple[Bucket, Tensor, float, NotesThen]) -> None:
        if key not in self._newer:
            self._waiting[key[0]] += 1
            self._changed.add(key)
            self._turns[key] = self._turn = self._turn + 1
        self._newer[key] = model

    def _dequeue(self, key: tuple[int, int]) -> tuple[Bucket, Tensor, float, NotesThen] | None:
        model = self._newer.pop(key, None)
        if model is not None:
            self._waiting[key[0]] -= 1
            self._changed.add(key)
        return model

    def _write(
        self, rank: int, bucket: Bucket, values: Tensor, wire: Tensor
    ) -> tuple[Tensor, Event | None]:
        if self._differences is None:
            message = cut(wire, 0, bucket.numel)
            return message, self._wire.encode(values, message)
        always = self._codec.always_sent(bucket)
        return self._differences.encode(rank, bucket, values, wire, always), None

    def _moved(self, bucket: Bucket, nbytes: int) -> int:
        """Return the bytes moved in memory for a message of ``nbytes``."""
        differences = self._differences
        return SENT * nbytes + (differences.extra_bytes(bucket, nbytes) if differences else 0)

    def _reclaim(self, key: tuple[int, int]) -> bool:
        request, wire = self._in_flight[key]
        try:
            if not self._transport.test(request):
                return False
            self._free.append(wire)
        except PeerFailedError:
            pass  # the buffer may still be read
        del self._in_flight[key]
        return True

    def _advance(self, keys: Iterable[tuple[int, int]]) -> None:
        """Send those queued models among ``keys`` that can be sent now, longest waiting first."""
        flying = self._in_flight
        ready = [key for key in keys if key in self._newer and flying[key][0].done]
        for key in sorted(ready, key=self._turns.__getitem__):
            if self._reclaim(key) and (model := self._dequeue(key)) is not None:
                self.send(key[0], *model)
        for rank in [rank for rank in self._ending if not self._waiting[rank]]:
            self._ending.remove(rank)
            self._transport.isend(Header(Kind.END).pack(), rank, Tag.MODEL)

    def keep_up(self, awaited: WaitSet) -> None:
        """Send what can be sent now, and add the sends that block the rest to ``awaited``.

        Their names in it are negative. Without them a model would wait until the next gradient,
        which never arrives from workers that wait for the model.
        """
        if not (self._newer or self._ending or self._awaited):
            return
        # Runs for every gradient: of thousands of waiting models, only check those that may go.
        self._advance(
            {*self._changed, *map(self._key, self._awaited.intersection(awaited.ended()))}
        )
        for key in sorted(self._changed):
            name = self._name(key)
            if key in self._newer:
                awaited.put(name, self._in_flight[key][0])
                self._awaited.add(name)
            elif name in self._awaited:
                awaited.drop(name)
                self._awaited.remove(name)
        self._changed.clear()

    def _key(self, name: int) -> tuple[int, int]:
        bucket, rank = divmod(-1 - name, self._transport.size)
        return rank, bucket

    def _name(self, key: tuple[int, int]) -> int:
        rank, bucket = key
        return -1 - (bucket * self._transport.size + rank)

    def end(self, rank: int) -> None:
        """Send a worker the end marker after all of its queued models."""
        self._ending.append(rank)

    def flush(self, awaited: WaitSet) -> None:
        """Wait until all is delivered, and remove all sends from ``awaited``."""
        for name in self._awaited:
            awaited.drop(name)
        self._awaited.clear()
        self._changed.clear()
        self._advance(list(self._newer))
        while self._newer:
            with suppress(PeerFailedError):
                self._transport.wait_any([self._in_flight[key][0] for key in self._newer])
            self._advance(list(self._newer))
        for key in list(self._in_flight):
            with suppress(PeerFailedError):
                self._transport.wait(self._in_flight[key][0])
            self._reclaim(key)
