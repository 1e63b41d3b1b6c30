"""A server's way out: models to the workers, none of which holds up another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress

import torch
from torch import Tensor

from aladdin_mpi.codec.base import GradientCodec
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.errors import PeerFailedError
from aladdin_mpi.exchange.receiver import Header, Kind, ReceivedBucket
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.flat.vectors import cut
from aladdin_mpi.transport.base import Event, Request, Transport, WaitSet, charge_memory

Notes = tuple[float, ...]
NotesThen = Notes | Callable[[], Notes]
"""Or what makes them when the model leaves, which may be later."""
SENT = 2
"""Bytes that move in memory for each that is sent: copied out."""


class ModelSender:
    """Models on their way to the workers, each a copy from the moment of sending.

    At most one of a bucket is under way to a worker; a newer one waits and
    replaces those that waited before it.
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
        """The order in which those in ``_newer`` began to wait."""
        self._turn = 0
        self._waiting: Counter[int] = Counter()
        """Of those in ``_newer``, how many are for each rank."""
        self._changed: set[tuple[int, int]] = set()
        """What has begun or ceased to wait since the last :meth:`keep_up`."""
        self._ending: list[int] = []
        self._awaited: set[int] = set()

    def open(self) -> None:
        """Begin a segment: with models as wholes."""
        if self._differences is not None:
            self._differences.forget()

    def use(self, rank: int, bits: int) -> None:
        """Send a worker's models in ``bits`` a value, where there is a choice."""
        if self._differences is not None:
            self._differences.use(rank, bits)

    def lost(self, source: int, message: Tensor) -> None:
        """A worker has told that a difference did not reach it."""
        if self._differences is not None:
            self._differences.lost(source, int(message.view(torch.int64)))

    def note(self, arrival: ReceivedBucket) -> None:
        """Take note of a gradient, which will change the model."""
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
        """Send a bucket's ``values``, or let them wait behind the last ones.

        ``exact``: as they are now, however long they wait; otherwise as they are then.
        """
        if rank in self._transport.failed:
            return
        key = (rank, bucket.index)
        if key in self._in_flight and not self._reclaim(key):
            self._wait_behind(key, (bucket, values.clone() if exact else values, alpha, notes))
            return
        self._take_waiting(key)
        wire = self._free.pop() if self._free else self._wire.buffer(self._largest)
        message, event = self._write(rank, bucket, values, wire)
        charge_memory(self._transport, self._moved(bucket, message.nbytes))
        told = notes() if callable(notes) else notes
        header = Header(Kind.BUCKETS, bucket=bucket.index, alpha=alpha, notes=told)
        self._transport.isend(header.pack(), rank, Tag.MODEL)
        request = self._transport.isend(message, rank, Tag.MODEL, after=event)
        self._in_flight[key] = (request, wire)

    def _wait_behind(
        self, key: tuple[int, int], model: tuple[Bucket, Tensor, float, NotesThen]
    ) -> None:
        if key not in self._newer:
            self._waiting[key[0]] += 1
            self._changed.add(key)
            self._turns[key] = self._turn = self._turn + 1
        self._newer[key] = model

    def _take_waiting(self, key: tuple[int, int]) -> tuple[Bucket, Tensor, float, NotesThen] | None:
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
        """Bytes that move in memory for a message of ``nbytes``."""
        differences = self._differences
        return SENT * nbytes + (differences.besides(bucket, nbytes) if differences else 0)

    def _reclaim(self, key: tuple[int, int]) -> bool:
        request, wire = self._in_flight[key]
        try:
            if not self._transport.test(request):
                return False
            self._free.append(wire)
        except PeerFailedError:
            pass  # the wire may still be read
        del self._in_flight[key]
        return True

    def _advance(self, keys: Iterable[tuple[int, int]]) -> None:
        """Send of these what waited and can go now, what has waited longest first."""
        flying = self._in_flight
        ready = [key for key in keys if key in self._newer and flying[key][0].done]
        for key in sorted(ready, key=self._turns.__getitem__):
            if self._reclaim(key) and (model := self._take_waiting(key)) is not None:
                self.send(key[0], *model)
        for rank in [rank for rank in self._ending if not self._waiting[rank]]:
            self._ending.remove(rank)
            self._transport.isend(Header(Kind.END).pack(), rank, Tag.MODEL)

    def keep_up(self, awaited: WaitSet) -> None:
        """Send what can go now, and have ``awaited`` wait for what the rest waits behind.

        The names in there are negative. Without that a model would wait until a gradient
        comes, which never comes from workers that wait for the model.
        """
        if not (self._newer or self._ending or self._awaited):
            return
        # Called for every gradient: of thousands that wait only those are looked at that may go.
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
        """Tell a worker that this was all, once what still waits for it has gone."""
        self._ending.append(rank)

    def flush(self, awaited: WaitSet) -> None:
        """Wait until all is delivered, and no more in ``awaited``."""
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
