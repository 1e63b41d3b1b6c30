"""Check that no copy of the test device uses memory at the time it is passed to MPI."""

from __future__ import annotations

from typing import Any

import torch

from aladdin_mpi.transport.mpi.engine import MpiTransport
from aladdin_mpi.transport.mpi.requests import Requests
from tests.late.device import runtime

WRITES = 2
too_early: list[str] = []
"""Operations on memory that a copy was still using."""


def install() -> None:
    """Check every send, receive and collective of this process from now on."""
    send, receive, collective = Requests.send, Requests._post_receive, MpiTransport._collective

    def watched_send(self: Requests, request: Any) -> None:
        _check(request.what, request.buffer, WRITES)
        send(self, request)

    def watched_receive(self: Requests, request: Any) -> None:
        _check(request.what, request.buffer, WRITES | 1)
        receive(self, request)

    def watched_collective(
        self: MpiTransport, name: str, volume: int, *given: Any, **kw: Any
    ) -> Any:
        buffers = [each[0] for each in given if isinstance(each, list)]
        for place, array in enumerate(buffers):
            _check(f"{name}, buffer {place}", torch.from_numpy(array), WRITES | bool(place))
        return collective(self, name, volume, *given, **kw)

    Requests.send = watched_send  # type: ignore[method-assign]
    Requests._post_receive = watched_receive  # type: ignore[method-assign]
    MpiTransport._collective = watched_collective  # type: ignore[method-assign]


def _check(what: str, buffer: torch.Tensor, forbidden: int) -> None:
    if runtime.uses_of(buffer.data_ptr(), buffer.nbytes) & forbidden:
        too_early.append(what)
