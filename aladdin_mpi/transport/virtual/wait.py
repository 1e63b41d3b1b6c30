"""Waiting in virtual time for one of many requests, without a look at each of them."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator

from aladdin_mpi.errors import PeerFailedError
from aladdin_mpi.transport.request import Request
from aladdin_mpi.transport.virtual.endpoint import Endpoint
from aladdin_mpi.transport.virtual.message import Operation
from aladdin_mpi.transport.wait_set import WaitSet


class VirtualWaitSet(WaitSet):
    """A set whose requests tell it when they are done.

    A server of a thousand workers takes millions of messages: a wait must not cost more
    where there are more workers. Its requests must not be waited for elsewhere.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.requests: dict[int, Request] = {}
        self._endpoint = endpoint
        self._done: list[tuple[int, int, Request]] = []
        self._shown = _Shown(self.requests)

    def put(self, name: int, request: Request) -> None:
        """See :meth:`WaitSet.put`; sends and receives only."""
        assert isinstance(request, Operation)
        self._forget(name)
        self.requests[name] = request
        request.name = name
        request.waiter = self
        if request.done:
            self.operation_done(request)

    def drop(self, name: int) -> None:
        """See :meth:`WaitSet.drop`."""
        self._forget(name)
        del self.requests[name]

    def _forget(self, name: int) -> None:
        former = self.requests.get(name)
        if isinstance(former, Operation):
            former.waiter = None

    def operation_done(self, operation: Request) -> None:
        """One of the requests is done: note it, and wake the rank if it waits for that."""
        assert isinstance(operation, Operation)
        heapq.heappush(self._done, (operation.order, operation.name, operation))
        self._endpoint.fiber.news(self._shown)

    def ended(self) -> list[int]:
        """See :meth:`WaitSet.ended`; those that wait cost nothing."""
        return [name for _, name, each in self._done if self.requests.get(name) is each]

    def wait(self) -> int:
        """See :meth:`WaitSet.wait`."""
        while True:
            while self._done:
                _, name, request = self._done[0]
                if self.requests.get(name) is request:
                    if request.failed is not None:
                        host = self._endpoint.fabric.network.hosts[request.failed]
                        raise PeerFailedError(request.failed, str(host))
                    return name
                heapq.heappop(self._done)  # has been replaced since
            self._endpoint.fiber.wait_for_news(self._shown)


class _Shown(Collection[Request]):
    """What a rank that waits for a set is seen to wait for.

    It contains nothing, so that no request is looked for in it: they tell the set.
    """

    def __init__(self, requests: dict[int, Request]) -> None:
        self._requests = requests

    def __contains__(self, request: object) -> bool:
        return False

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __len__(self) -> int:
        return len(self._requests)
