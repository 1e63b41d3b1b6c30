"""What an algorithm's server stands on: gradients in their order of arrival, models sent out.

Nothing here waits for one particular worker: receives are always posted for each,
messages are taken as they come, and a worker that is slow to take a model holds up
nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from aladdin_mpi.compression.codec import GradientCodec
from aladdin_mpi.control.refusals import Reason, Refusal, report
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.model.layout import Bucket, Layout
from aladdin_mpi.model.vectors import add, copy, is_finite
from aladdin_mpi.parameter_server.frames import Header, Kind, new_header
from aladdin_mpi.roles.former import Former
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.request import Event, PeerFailedError, Request
from aladdin_mpi.transport.sealed import is_void
from aladdin_mpi.transport.wait_set import WaitSet

if TYPE_CHECKING:
    from torch import Tensor

Notes = tuple[float, ...]
NotesThen = Notes | Callable[[], Notes]
"""Or what makes them when the model leaves, which may be later."""

TAKEN = 5
"""Bytes that move in memory for each that comes: copied in (2), and added (3)."""
SENT = 2
"""Bytes that move in memory for each that is sent: copied out."""
RECEIVES_AHEAD = 8
"""Messages of each worker for which a receive is posted."""


@dataclass
class Arrival:
    """One bucket of a worker's gradient.

    The message may be kept until the next arrival is asked for, or for good by
    :meth:`exchange` where it is dense. ``count`` gradients are summed in it.
    ``worker`` counts from 0.

    Attributes:
        storage: holds the message, and has room for the bucket's values.
        codec: reads the message; None: it is dense.
        length: of the message, in values of the wire's dtype; None: the bucket's.
        notes: of the gradient's header.
        refused: it was not finite, or damaged on its way, and holds zeros now: neutral for
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

    @property
    def is_dense(self) -> bool:
        """Whether the message is the bucket's values as they are."""
        return self.codec is None or self.length == self.bucket.numel

    @property
    def nbytes(self) -> int:
        """Of the message."""
        length = self.bucket.numel if self.length is None else self.length
        return length * self.storage.itemsize

    @property
    def values(self) -> Tensor:
        """The gradient, of the bucket's length; a copy unless :attr:`is_dense`."""
        values = self.storage[: self.bucket.numel]
        if self.is_dense:
            return values
        values = torch.zeros_like(values, dtype=torch.float32)
        self.add_to(values)
        return values

    def add_to(self, target: Tensor, alpha: float = 1.0) -> None:
        """``target <- target + alpha * gradient``, which costs as much as the message is long."""
        if target.is_meta:
            return
        if self.codec is None or self.is_dense:
            add(target, self.values, alpha)
        else:
            self.codec.add(self.bucket, self.storage[: self.length], target, alpha)

    @property
    def is_finite(self) -> bool:
        """Whether all values in the message are finite; costs one reading of them."""
        if self.codec is None or self.is_dense:
            return is_finite(self.values)
        return is_finite(self.codec.numbers(self.bucket, self.storage[: self.length]))

    def refuse(self) -> None:
        """Let zeros stand in for what has come."""
        self.refused = True
        self.storage[: self.length].zero_()

    def exchange(self, storage: Tensor) -> Tensor:
        """Keep the received storage and give another for later receives: no copy."""
        self.storage, mine = storage, self.storage
        return mine


class _Intake:
    """The gradients of one worker: receives posted in the order in which it sends.

    That order is known, header then this server's buckets, so every receive is
    posted for one certain message.
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
        self._posted: deque[tuple[Request, Tensor | None]] = deque()
        self._post_next = 0
        self._take_next = 0
        self.header = Header(Kind.END)
        self.ended = True

    def open(self) -> None:
        self._post_next = self._take_next = 0
        self.ended = False
        for _ in range(RECEIVES_AHEAD):
            self._post()

    @property
    def head(self) -> Request:
        """The receive of the message that has to be taken next."""
        return self._posted[0][0]

    def _post(self) -> None:
        turn = self._post_next % (1 + len(self._buckets))
        self._post_next += 1
        if turn == 0:
            buffer, storage = new_header(self._notes), None
        else:
            storage = self._storages.pop()
            buffer = storage[: self._buckets[turn - 1].numel]
        request = self._transport.irecv(buffer, self._source, Tag.GRADIENT)
        self._posted.append((request, storage))

    def take(self, worker: int) -> Arrival | None:
        """The message at the head: a bucket, or None for a header."""
        request, storage = self._posted.popleft()
        turn = self._take_next % (1 + len(self._buckets))
        self._take_next += 1
        if storage is None:
            self.header = Header.received(request)
            self.ended = self.header.kind == Kind.END
            if not self.ended:
                self._post()
            return None
        bucket, gradients = self._buckets[turn - 1], self.header.gradients
        length = request.nbytes // storage.itemsize
        notes = self.header.notes
        return Arrival(worker, bucket, gradients, storage, self._codec, length, notes)

    def give_back(self, arrival: Arrival) -> None:
        self._storages.append(arrival.storage)
        self._post()

    def close(self) -> None:
        """Take back the receives behind the worker's last message."""
        self.ended = True
        for request, storage in self._posted:
            self._transport.cancel(request)
            # What a rank that has failed was sending may still be written.
            if storage is not None and request.failed is None:
                self._storages.append(storage)
        self._posted.clear()


class _ModelSender:
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

    def note(self, arrival: Arrival) -> None:
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
        if rank in self._transport.failed:
            return
        key = (rank, bucket.index)
        if key in self._in_flight and not self._reclaim(key):
            self._newer[key] = (bucket, values.clone() if exact else values, alpha, notes)
            return
        self._newer.pop(key, None)
        wire = self._free.pop() if self._free else self._wire.buffer(self._largest)
        message, event = self._write(rank, bucket, values, wire)
        self._transport.charge_memory(self._moved(bucket, message.nbytes))
        told = notes() if callable(notes) else notes
        header = Header(Kind.BUCKETS, bucket=bucket.index, alpha=alpha, notes=told)
        self._transport.isend(header.pack(), rank, Tag.MODEL)
        request = self._transport.isend(message, rank, Tag.MODEL, after=event)
        self._in_flight[key] = (request, wire)

    def _write(
        self, rank: int, bucket: Bucket, values: Tensor, wire: Tensor
    ) -> tuple[Tensor, Event | None]:
        if self._differences is None:
            message = wire[: bucket.numel]
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

    def advance(self) -> None:
        """Send what waited and can go now."""
        for key in [key for key in self._newer if self._reclaim(key)]:
            self.send(key[0], *self._newer.pop(key))
        for rank in [rank for rank in self._ending if not self._awaits(rank)]:
            self._ending.remove(rank)
            self._transport.isend(Header(Kind.END).pack(), rank, Tag.MODEL)

    def keep_up(self, awaited: WaitSet) -> None:
        """Send what can go now, and have ``awaited`` wait for what the rest waits behind.

        The names in there are negative. Without that a model would wait until a gradient
        comes, which never comes from workers that wait for the model.
        """
        if not (self._newer or self._ending or self._awaited):
            return
        self.advance()
        behind = {self._name(key): self._in_flight[key][0] for key in self._newer}
        for name in self._awaited.difference(behind):
            awaited.drop(name)
        for name, request in behind.items():
            awaited.put(name, request)
        self._awaited = set(behind)

    def _name(self, key: tuple[int, int]) -> int:
        rank, bucket = key
        return -1 - (bucket * self._transport.size + rank)

    def _awaits(self, rank: int) -> bool:
        return any(key[0] == rank for key in self._newer)

    def end(self, rank: int) -> None:
        """Tell a worker that this was all, once what still waits for it has gone."""
        self._ending.append(rank)

    def flush(self, awaited: WaitSet) -> None:
        """Wait until all is delivered, and no more in ``awaited``."""
        for name in self._awaited:
            awaited.drop(name)
        self._awaited = set()
        self.advance()
        while self._newer:
            with suppress(PeerFailedError):
                self._transport.wait_any([self._in_flight[key][0] for key in self._newer])
            self.advance()
        for key in list(self._in_flight):
            with suppress(PeerFailedError):
                self._transport.wait(self._in_flight[key][0])
            self._reclaim(key)


class ParameterServer:
    """One server: its buckets of the global model, and its talk with the workers.

    Args:
        parameters: the whole initial model; the server copies its own buckets.
        schedule: learning rate as a function of the samples drawn by all workers.
        notes: most numbers that come with a gradient.
    """

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        parameters: Tensor,
        codec: GradientCodec,
        schedule: Callable[[int], float],
        notes: int = 0,
    ) -> None:
        self.transport = transport
        self.layout = layout
        self.codec = codec
        self.arriving = codec
        """What arriving messages are read by; an algorithm may have its own."""
        self.buckets = layout.owned_by(transport.rank)
        self.worker_count = transport.size - layout.servers
        self.values = {b.index: parameters[b.part].clone() for b in self.buckets}
        self.samples = 0
        self.received = 0
        self.staleness = 0.0
        self.measures: Callable[[], dict[str, float]] = dict
        """What an algorithm has to say of itself in each line of the metrics."""
        self.partial = {b.index: 0 for b in self.buckets}
        """Gradients of a bucket whose worker failed before all buckets had come."""
        self.given = [0] * self.worker_count
        """Gradients taken as a whole from every worker, up to the last segment."""
        self._from_former = 0
        self.taken = self._nothing_taken()
        """Gradients taken in this segment, for every worker and bucket."""
        self._seen = [0] * self.worker_count
        self._schedule = schedule
        self._sender = _ModelSender(transport, codec, layout.largest)
        transport.on_message(Tag.WHOLE, 8, self._sender.lost)
        self._intakes = [
            _Intake(transport, layout.servers + w, self.buckets, layout.largest, codec, notes)
            for w in range(self.worker_count)
        ]

    @property
    def lr(self) -> float:
        """Learning rate at the newest sample that a gradient was computed from."""
        return self._schedule(self.samples)

    def _nothing_taken(self) -> list[dict[int, int]]:
        return [{b.index: 0 for b in self.buckets} for _ in range(self.worker_count)]

    def gradients(
        self, on_end: Callable[[int], None] | None = None, look: bool = True
    ) -> Iterator[Arrival]:
        """Buckets of gradients in their order of arrival, until every worker has ended.

        What is not finite is refused.

        Args:
            on_end: called with each worker that ends, after its last gradient, or fails.
            look: whether to look for values that are not finite; else whoever uses them
                does, and says so by :meth:`tell_refused`.
        """
        self._sender.open()
        self.taken = self._nothing_taken()
        first, failed = self.layout.servers, self.transport.failed
        open_workers = [w for w in range(self.worker_count) if first + w not in failed]
        for worker in open_workers:
            self._intakes[worker].open()
        heads = self.transport.wait_set()
        for worker in open_workers:
            heads.put(worker, self._intakes[worker].head)
        for worker in set(range(self.worker_count)).difference(open_workers):
            if on_end is not None:
                on_end(worker)
        still_open = set(open_workers)
        while still_open:
            self._sender.keep_up(heads)
            try:
                worker = heads.wait()
                if worker not in still_open:
                    continue  # a model has left, and the next one can go
                yield from self._take(worker, look)
            except PeerFailedError as failure:
                worker = failure.rank - first
                if worker not in still_open:
                    continue  # it had ended: only a model to it was still awaited
                self._lose(worker)
            if not self._intakes[worker].ended:
                heads.put(worker, self._intakes[worker].head)
                continue
            still_open.remove(worker)
            heads.drop(worker)
            self._intakes[worker].close()
            if on_end is not None:
                on_end(worker)
            self._sender.end(self.layout.servers + worker)
        self.given = [self.given[w] + self.whole_from(w) for w in range(self.worker_count)]
        self._sender.flush(heads)

    def _take(self, worker: int, look: bool) -> Iterator[Arrival]:
        intake = self._intakes[worker]
        arrival = intake.take(worker)
        if arrival is None:
            self._count(worker, intake.header)
        else:
            besides = self.arriving.besides(arrival.bucket, arrival.nbytes)
            self.transport.charge_memory(TAKEN * arrival.nbytes + besides)
            self._sender.note(arrival)
            self.taken[worker][arrival.bucket.index] += arrival.count
            self._look(arrival, look)
            yield arrival
            intake.give_back(arrival)

    def _lose(self, worker: int) -> None:
        """Close the books on a worker that has failed."""
        self._intakes[worker].ended = True
        whole = self.whole_from(worker)
        for index, taken in self.taken[worker].items():
            self.partial[index] += taken - whole

    def has_failed(self, worker: int) -> bool:
        """Whether a worker is known to have failed."""
        return self.layout.servers + worker in self.transport.failed

    def whole_from(self, worker: int) -> int:
        """Gradients of which all buckets have been taken from a worker in this segment."""
        return min(self.taken[worker].values(), default=0)

    @property
    def from_failed(self) -> int:
        """Gradients taken as a whole from workers that have failed."""
        return self._from_former + sum(
            given for worker, given in enumerate(self.given) if self.has_failed(worker)
        )

    def books(self, totals: dict[int, int], dropped: int = 0) -> dict[str, int]:
        """The accounts of a server whose buckets have seen ``totals`` gradients each.

        Raises:
            AssertionError: they differ by more than what failed workers sent in part.
        """
        alike = {totals[index] - partial for index, partial in self.partial.items()}
        if len(alike) > 1:
            raise AssertionError(f"gradients applied differ between buckets: {sorted(alike)}")
        total = alike.pop() if alike else 0
        accounts = {"applied": total - dropped, "dropped": dropped}
        return accounts | ({"from_failed": self.from_failed} if self.from_failed else {})

    def _look(self, arrival: Arrival, thoroughly: bool) -> None:
        """Refuse what is damaged or, with ``thoroughly``, not finite: it would spoil the model.

        That costs one reading of the values, which the cache holds then for the addition that
        follows.
        """
        message = arrival.storage[: arrival.length]
        if message.is_meta:
            return
        if is_void(message):
            arrival.refuse()  # those who saw it arrive have told of it
        elif thoroughly and not is_finite(self.arriving.numbers(arrival.bucket, message)):
            arrival.refuse()
            self.tell_refused(arrival)

    def tell_refused(self, arrival: Arrival) -> None:
        """Tell rank 0 of a gradient that is refused because it is not finite."""
        rank = self.layout.servers + arrival.worker
        where = rank, arrival.bucket.index, self._intakes[arrival.worker].header.samples
        report(self.transport, Refusal(Reason.ARRIVED, *where))

    def _count(self, worker: int, header: Header) -> None:
        if header.kind == Kind.BUCKETS:
            self.samples = max(self.samples, header.samples)
            stale = self.received - self._seen[worker]
            self.staleness += 0.02 * (stale - self.staleness)
            self.received += header.gradients

    def model_bits(self, worker: int, bits: int) -> None:
        """Send a worker's models in ``bits`` a value from now on, where the wire has a choice."""
        self._sender.use(self.layout.servers + worker, bits)

    def send_model(
        self,
        worker: int,
        bucket: Bucket,
        alpha: float = 1.0,
        notes: NotesThen = (),
        exact: bool = False,
    ) -> None:
        """Send the bucket's present values to a worker, which blends them in by ``alpha``.

        If it has to wait for an earlier one to leave, newer values may be sent instead,
        unless ``exact``. ``notes`` go with them; a function is asked when they leave.
        """
        if bucket is self.buckets[0]:
            self._seen[worker] = self.received
        values = self.values[bucket.index]
        self._sender.send(self.layout.servers + worker, bucket, values, alpha, notes, exact)

    def state_dict(self) -> dict[str, object]:
        """The server's part of the model and its counters."""
        return {
            "values": self.values,
            "samples": self.samples,
            "received": self.received,
            "staleness": self.staleness,
            "seen": self._seen,
            "partial": self.partial,
            "from_failed": self.from_failed,
            "given": [0 if self.has_failed(w) else n for w, n in enumerate(self.given)],
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Take up a state from :meth:`state_dict`."""
        values = state["values"]
        assert isinstance(values, dict)
        for index, tensor in values.items():
            self.values[index].copy_(tensor)
        self.samples = int(str(state["samples"]))
        self.received = int(str(state["received"]))
        self.staleness = float(str(state["staleness"]))
        seen = state["seen"]
        assert isinstance(seen, list)
        self._seen = seen
        partial = state["partial"]
        assert isinstance(partial, dict)
        self.partial = partial
        self._from_former = int(str(state["from_failed"]))
        given = state["given"]
        assert isinstance(given, list)
        self.given = given

    def resize(self, former: Former) -> None:
        """Take this server's part of the global model, and the books as far as they go on."""
        for bucket in self.buckets:
            copy(self.values[bucket.index], former.model[bucket.part])
        joined, n = former.server, self.worker_count
        self.samples, self.received = joined["samples"], joined["received"]
        self.staleness, self._from_former = joined["staleness"], joined["from_failed"]
        self._seen = [self.received] * n
        self.given = [int(former.carried("computed", worker, n)) for worker in range(n)]
