"""The requests of the MPI engine that have not ended yet, in lines.

MPI matches messages between two ranks under one tag in their order, so of the receives posted
for them only the first is worth asking about; of sends likewise. A server with eight workers
has a hundred requests and a dozen lines. Asking about all of them made a look a quarter longer
where ranks share their cores (docs/performance.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator

from mpi4py import MPI
from torch import Tensor

from aladdin_mpi.transport.request import ANY_SOURCE, Request

SMALL = 1 << 16
"""Bytes of a message that comes within a look or two, which may then be rare."""


class MpiRequest(Request):
    """A message or a collective under way.

    Args:
        what: a few words for messages to the user.
        buffer: lives as long as the request.
        receives: whether it is a receive.
        peer: the other rank; ``ANY_SOURCE``: not known, or all of them.
        tag: below 0 for collectives.
    """

    __slots__ = ("broken", "handle", "peer", "receives", "tag")

    def __init__(
        self,
        what: str,
        buffer: Tensor | None,
        receives: bool,
        peer: int = ANY_SOURCE,
        tag: int = -1,
    ) -> None:
        super().__init__(what, buffer)
        self.receives = receives
        self.peer = peer
        self.tag = tag
        self.handle: MPI.Request = MPI.REQUEST_NULL
        self.broken: tuple[MPI.Exception, float] | None = None
        """By a death of which MPI has not told yet whose it is, and since when."""

    @property
    def is_collective(self) -> bool:
        """Whether all ranks take part in it."""
        return self.tag < 0 and not self.receives

    @property
    def line(self) -> Hashable:
        """The same for requests that MPI matches in their order; each collective has its own."""
        return id(self) if self.is_collective else (self.receives, self.peer, self.tag)


class Pending:
    """Requests in lines, each in the order in which they were added."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, deque[MpiRequest]] = {}
        self._firsts: list[MpiRequest] = []
        self._handles: list[MPI.Request] = []
        self._stale = False
        self._is_idle = True

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[MpiRequest]:
        """All of them, line by line; they may be removed meanwhile."""
        return iter([request for line in self._lines.values() for request in line])

    def add(self, request: MpiRequest) -> None:
        """Put at the end of its line one that MPI has been given."""
        line = self._lines.setdefault(request.line, deque())
        line.append(request)
        self._stale |= len(line) == 1

    def remove(self, request: MpiRequest) -> None:
        """Take out one that has been added, wherever in its line it stands."""
        self._lines[request.line].remove(request)
        self._tidy(request.line)

    def before(self, request: MpiRequest) -> list[MpiRequest]:
        """Those of the line in which ``request`` is to be added."""
        return list(self._lines.get(request.line, ()))

    def firsts(self) -> list[MpiRequest]:
        """The first of each line."""
        self._look_again()
        return self._firsts

    def handles(self) -> list[MPI.Request]:
        """What MPI knows :meth:`firsts` by."""
        self._look_again()
        return self._handles

    @property
    def is_idle(self) -> bool:
        """Whether no data are under way: all wait for small messages, which may come or not."""
        self._look_again()
        return self._is_idle

    def drop_ended(self) -> None:
        """Take out those at the head of a line that have ended."""
        for name, line in list(self._lines.items()):
            if line[0].done:
                while line and line[0].done:
                    line.popleft()
                self._tidy(name)

    def drop_all_ended(self) -> None:
        """Take out all that have ended, wherever they stand."""
        for request in self:
            if request.done:
                self.remove(request)

    def _tidy(self, name: Hashable) -> None:
        if not self._lines[name]:
            del self._lines[name]
        self._stale = True

    def _look_again(self) -> None:
        if self._stale:
            self._firsts = [line[0] for line in self._lines.values()]
            self._handles = [request.handle for request in self._firsts]
            self._is_idle = all(map(_awaits_little, self._firsts))
            self._stale = False


def _awaits_little(request: MpiRequest) -> bool:
    return request.receives and request.buffer is not None and request.buffer.nbytes <= SMALL
