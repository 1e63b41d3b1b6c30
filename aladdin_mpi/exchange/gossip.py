"""Models sent between workers, and the inbox that mixes them in."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from aladdin_mpi.codec.base import DenseWire
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.errors import PeerFailedError
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.flat.vectors import host_vector, lerp
from aladdin_mpi.transport.base import Request, wait_ended
from aladdin_mpi.transport.checksums import intact, is_void
from aladdin_mpi.worker.worker import Worker


class _Copy:
    """A model in flight."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.requests: list[Request] = []


class ModelOutbox:
    """Copies of a flat vector in flight to other workers.

    The vector may be changed as soon as :meth:`send` has returned.

    Args:
        tag: tag of the messages: a header, if any, then the buckets in order.
        copies: largest number of copies in flight.
    """

    def __init__(self, worker: Worker, wire: DenseWire, tag: Tag, copies: int = 1) -> None:
        self._transport = worker.transport
        self._layout = worker.layout
        self._wire = wire
        self._tag = tag
        self._copies = [_Copy(wire.buffer(worker.layout.numel)) for _ in range(copies)]

    @property
    def is_free(self) -> bool:
        """Whether :meth:`send` would return without waiting."""
        return all(self._is_delivered(request) for request in self._copies[0].requests)

    def _is_delivered(self, request: Request) -> bool:
        try:
            return self._transport.test(request)
        except PeerFailedError:
            return True  # the receiver has failed

    def send(self, vector: Tensor, dest: int, header: Tensor | None = None) -> Tensor:
        """Send to rank ``dest``; wait for the oldest copy if all are in flight.

        Returns the values as sent, valid until the copy is reused.
        """
        copy = self._copies.pop(0)
        self._copies.append(copy)
        wait_ended(self._transport, copy.requests)
        event = self._wire.encode(vector, copy.values)
        if event is not None:
            event.hold()  # later changes of the vector are ordered after the copy
        send, tag = self._transport.isend, self._tag
        copy.requests = [] if header is None else [send(header, dest, tag)]
        for bucket in self._layout.buckets:
            copy.requests.append(send(bucket.of(copy.values), dest, tag, after=event))
        return copy.values

    def flush(self) -> None:
        """Wait until all copies are delivered."""
        for copy in self._copies:
            wait_ended(self._transport, copy.requests)
            copy.requests = []


class GossipInbox:
    """The weighted mean of all models that have arrived but have not been taken.

    Since mixing is a weighted mean, waiting models can be mixed with each other: the inbox
    needs the memory of one model, however many arrive. A message is a header with the weight
    of each bucket, then the buckets; an empty one marks the end of its sender's segment. Each
    bucket is mixed on arrival, with its own weight in ``weights``, so that none waits for the
    rest of its model.
    """

    def __init__(self, worker: Worker, wire: DenseWire) -> None:
        self._transport = worker.transport
        self._layout = worker.layout
        self._wire = wire
        self._others = [rank for rank in range(worker.transport.size) if rank != worker.index]
        self._mean = host_vector(worker.parameters)
        self.weights = [0.0] * len(worker.layout.buckets)
        self._lost = [0.0] * len(worker.layout.buckets)
        """Weights of buckets that were damaged in transit."""
        self._announced: dict[int, deque[tuple[Bucket, float]]] = {
            rank: deque() for rank in self._others
        }
        self._ended: set[int] = set()
        self._all_ended = False
        largest = worker.layout.largest * wire.dtype.itemsize
        nbytes = max(8 * len(worker.layout.buckets), largest)
        worker.transport.on_message(Tag.GOSSIP, nbytes, self._receive)
        worker.transport.on_failure(lambda rank: self._check_ended())

    def _receive(self, source: int, message: Tensor) -> None:
        announced = self._announced[source]
        if announced:
            bucket, weight = announced.popleft()
            self._mix(bucket, weight, message.view(self._wire.dtype))
        elif message.numel():
            weights = intact(message.view(torch.float64), source).tolist()
            announced.extend(zip(self._layout.buckets, weights, strict=True))
        else:
            self._ended.add(source)
            self._check_ended()

    def _mix(self, bucket: Bucket, weight: float, values: Tensor) -> None:
        if is_void(values):
            self._lost[bucket.index] += weight
            return
        # A running mean, not a sum of weighted values, stays accurate for very small weights.
        self.weights[bucket.index] += weight
        lerp(bucket.of(self._mean), values, weight / self.weights[bucket.index])

    def _check_ended(self) -> None:
        """Send the end marker to this rank itself once all other ranks have ended the segment."""
        if not self._all_ended and self._ended.union(self._transport.failed).issuperset(
            self._others
        ):
            # Handlers cannot wake a waiting thread, but a message can.
            self._all_ended = True
            self._transport.isend(_empty(), self._transport.rank, Tag.GOSSIP_ENDED)

    def take_into(self, x: Tensor, alpha: list[float]) -> None:
        """Compute ``x <- (alpha x + a m) / (alpha + a)``, ``alpha <- alpha + a`` for every bucket.

        m is the mean in this inbox and a its weight, which becomes 0. The weight of damaged buckets
        is added to x's, as if they had been equal to x: the sum of all weights stays 1.
        """
        for bucket in self._layout.buckets:
            with self._transport.atomic():
                alpha[bucket.index] += self._lost[bucket.index]
                self._lost[bucket.index] = 0.0
                a = self.weights[bucket.index]
                if a:
                    total = alpha[bucket.index] + a
                    lerp(bucket.of(x), bucket.of(self._mean), a / total)
                    alpha[bucket.index], self.weights[bucket.index] = total, 0.0

    def drain(self) -> None:
        """Announce the end of this rank's messages, and wait for the others' announcements."""
        all_ended = self._transport.irecv(_empty(), self._transport.rank, Tag.GOSSIP_ENDED)
        for rank in self._others:
            self._transport.isend(_empty(), rank, Tag.GOSSIP)
        with self._transport.atomic():
            self._check_ended()
        self._transport.wait(all_ended)
        # No rank ends the next segment before all have started it.
        self._ended.clear()
        self._all_ended = False


def _empty() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)
