"""Models sent from worker to worker, and the inbox that mixes them in."""

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
    """A model on its way."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.requests: list[Request] = []


class ModelOutbox:
    """Copies of a flat vector on their way to other workers.

    The vector may be changed as soon as :meth:`send` has returned.

    Args:
        tag: of the messages: a header, if there is one, then the buckets in order.
        copies: largest number on their way at once.
    """

    def __init__(self, worker: Worker, wire: DenseWire, tag: Tag, copies: int = 1) -> None:
        self._transport = worker.transport
        self._layout = worker.layout
        self._wire = wire
        self._tag = tag
        self._copies = [_Copy(wire.buffer(worker.layout.numel)) for _ in range(copies)]

    @property
    def is_free(self) -> bool:
        """Whether :meth:`send` would not have to wait."""
        return all(self._is_delivered(request) for request in self._copies[0].requests)

    def _is_delivered(self, request: Request) -> bool:
        try:
            return self._transport.test(request)
        except PeerFailedError:
            return True  # nobody waits for it

    def send(self, vector: Tensor, dest: int, header: Tensor | None = None) -> Tensor:
        """Send to rank ``dest``; waits for the oldest copy if all are on their way.

        Returns the values as they are sent, until the copy is needed again.
        """
        copy = self._copies.pop(0)
        self._copies.append(copy)
        wait_ended(self._transport, copy.requests)
        event = self._wire.encode(vector, copy.values)
        if event is not None:
            event.hold()  # what changes the vector from now on comes after the copying
        send, tag = self._transport.isend, self._tag
        copy.requests = [] if header is None else [send(header, dest, tag)]
        for bucket in self._layout.buckets:
            copy.requests.append(send(bucket.of(copy.values), dest, tag, after=event))
        return copy.values

    def flush(self) -> None:
        """Wait until everything is delivered."""
        for copy in self._copies:
            wait_ended(self._transport, copy.requests)
            copy.requests = []


class GossipInbox:
    """The weighted mean of all models that have come and not been taken yet.

    Mixing is a weighted mean, so that models which wait can be mixed with each other:
    the inbox needs the memory of one model, however many come. A message is a
    header with the weight of each bucket, then the buckets; an empty one says that
    its sender's segment is over. Each bucket is mixed as soon as it has come, with a
    weight of its own in ``weights``, so that none waits for the rest of its model.
    """

    def __init__(self, worker: Worker, wire: DenseWire) -> None:
        self._transport = worker.transport
        self._layout = worker.layout
        self._wire = wire
        self._others = [rank for rank in range(worker.transport.size) if rank != worker.index]
        self._mean = host_vector(worker.parameters)
        self.weights = [0.0] * len(worker.layout.buckets)
        self._lost = [0.0] * len(worker.layout.buckets)
        """Weights of buckets that were damaged on their way."""
        self._announced: dict[int, deque[tuple[Bucket, float]]] = {
            rank: deque() for rank in self._others
        }
        self._ended: set[int] = set()
        self._all_told = False
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
        # A running mean, not a sum of weighted values: it holds however small the weights are.
        self.weights[bucket.index] += weight
        lerp(bucket.of(self._mean), values, weight / self.weights[bucket.index])

    def _check_ended(self) -> None:
        """If no other has anything more to say in this segment, say so to who waits."""
        if not self._all_told and self._ended.union(self._transport.failed).issuperset(
            self._others
        ):
            # Handlers cannot wake who waits; a message can.
            self._all_told = True
            self._transport.isend(_nothing(), self._transport.rank, Tag.GOSSIP_ENDED)

    def take_into(self, x: Tensor, alpha: list[float]) -> None:
        """``x <- (alpha x + a m) / (alpha + a)``, ``alpha <- alpha + a`` for every bucket.

        m is the mean in this inbox and a its weight, which is 0 then. The weight of what was
        damaged goes to x, as if it had been like x: the sum of all weights stays 1.
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
        """Tell all others that this was all, and wait until all have said so."""
        all_ended = self._transport.irecv(_nothing(), self._transport.rank, Tag.GOSSIP_ENDED)
        for rank in self._others:
            self._transport.isend(_nothing(), rank, Tag.GOSSIP)
        with self._transport.atomic():
            self._check_ended()
        self._transport.wait(all_ended)
        # Nobody ends the next segment before all have begun it.
        self._ended.clear()
        self._all_told = False


def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)
