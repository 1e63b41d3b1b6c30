"""Requests that are waited for again and again, all at once, as a server waits for its workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aladdin_mpi.transport.request import Request


class WaitSet:
    """Requests by name, of which :meth:`wait` finds the one that was done first.

    The same as ``wait_any`` over a list in which one request is replaced at a time. An
    engine may have a set of its own, whose waits do not look at every request.

    Args:
        wait_any: of the transport.
    """

    def __init__(self, wait_any: Callable[[Sequence[Request]], int]) -> None:
        self.requests: dict[int, Request] = {}
        self._wait_any = wait_any

    def put(self, name: int, request: Request) -> None:
        """Wait for ``request`` from now on, under this name, and not for the one before it."""
        self.requests[name] = request

    def drop(self, name: int) -> None:
        """Wait no more for the request of this name."""
        del self.requests[name]

    def ended(self) -> list[int]:
        """The names of those known to have ended."""
        return [name for name, request in self.requests.items() if request.done]

    def wait(self) -> int:
        """Wait until one is done; the name of the first. It stays until it is replaced.

        Raises:
            PeerFailedError, WaitTimeoutError: as ``wait_any`` does.
        """
        first = self._wait_any(list(self.requests.values()))
        return list(self.requests)[first]
