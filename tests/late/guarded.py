"""Watches what is handed to MPI: no copy of the device "late" may use that memory meanwhile."""

from __future__ import annotations

from typing import Any

import torch

from aladdin_mpi.transport.mpi.engine import MpiTransport
from aladdin_mpi.transport.mpi.requests import Requests
from tests.late.device import runtime

WRITES = 2
found: list[str] = []
"""What was handed over too early."""


def install() -> None:
    """Look at every send, receive and collective of this process from now on."""
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
        found.append(what)
