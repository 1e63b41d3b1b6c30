"""A transport among some of the ranks, which have numbers of their own in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from aladdin_mpi.errors import PeerFailedError
from aladdin_mpi.transport.base import Handler, Transport
from aladdin_mpi.transport.layer import Layer
from aladdin_mpi.transport.request import Event, Request


class PartOfRanks(Layer):
    """Messages between two of ``ranks``; their numbers are their places in it.

    Collectives of the engine need all ranks, so there are none.

    Args:
        inner: among all ranks.
        ranks: this one is among them.
    """

    has_collectives = False

    def __init__(self, inner: Transport, ranks: Sequence[int]) -> None:
        super().__init__(inner)
        self.meets = False  # not all of its ranks are here
        self._ranks = tuple(ranks)
        self._places = {rank: place for place, rank in enumerate(ranks)}
        self.rank, self.size = self._places[inner.rank], len(ranks)
        self.hosts = [inner.hosts[rank] for rank in ranks]

    @property
    def host(self) -> int:
        return self.inner.host

    def host_name(self, rank: int) -> str:
        return self.inner.host_name(self._ranks[rank])

    def original(self, rank: int) -> int:
        return self.inner.original(self._ranks[rank])

    def isend(self, buffer: Tensor, dest: int, tag: int, after: Event | None = None) -> Request:
        return self.inner.isend(buffer, self._ranks[dest], tag, after)

    def isend_numbers(self, numbers: Sequence[float], dest: int, tag: int) -> Request:
        return self.inner.isend_numbers(numbers, self._ranks[dest], tag)

    def irecv(self, buffer: Tensor, source: int, tag: int) -> Request:
        return self.inner.irecv(buffer, self._ranks[source], tag)

    def test(self, request: Request) -> bool:
        try:
            return self.inner.test(request)
        except PeerFailedError as error:
            raise self._with_place(error) from None

    def wait_any(self, requests: Sequence[Request], timeout: float | None = None) -> int:
        try:
            return self.inner.wait_any(requests, timeout)
        except PeerFailedError as error:
            raise self._with_place(error) from None

    def _with_place(self, error: PeerFailedError) -> PeerFailedError:
        """The same, naming the rank by its place."""
        place = self._places.get(error.rank, error.rank)
        return PeerFailedError(place, self.inner.host_name(error.rank))

    def on_message(self, tag: int, nbytes: int, handler: Handler) -> None:
        self.inner.on_message(
            tag, nbytes, lambda source, message: handler(self._places[source], message)
        )

    @property
    def failed(self) -> frozenset[int]:
        return self._here(self.inner.failed)

    @property
    def excluded(self) -> frozenset[int]:
        return self._here(self.inner.excluded)

    def _here(self, ranks: frozenset[int]) -> frozenset[int]:
        return frozenset(self._places[rank] for rank in ranks if rank in self._places)

    def exclude(self, rank: int) -> None:
        self.inner.exclude(self._ranks[rank])

    def on_failure(self, action: Callable[[int], None]) -> None:
        def act(rank: int) -> None:
            if rank in self._places:
                action(self._places[rank])

        self.inner.on_failure(act)
