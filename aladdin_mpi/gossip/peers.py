"""Models that workers send to each other."""

from __future__ import annotations

from torch import Tensor

from aladdin_mpi.compression.codec import DenseWire
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.errors import PeerFailedError
from aladdin_mpi.roles.worker import Worker
from aladdin_mpi.transport.request import Request


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
        self._transport.wait_ended(copy.requests)
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
            self._transport.wait_ended(copy.requests)
            copy.requests = []
