"""Collectives of a group that is not all ranks of the job: over its messages, on any engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from aladdin_mpi.transport.collectives import Part, Steps
from aladdin_mpi.transport.request import Request

if TYPE_CHECKING:
    from torch import Tensor

FIRST_TAG = 40_000
NUMBERS = 20_000
"""Tags of collectives: so many can be under way at once."""


class Channel:
    """Point to point among the ranks of one collective.

    Args:
        send: starts to send a buffer to a rank.
        receive: posts a receive from a rank.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        send: Callable[[Tensor, int], Request],
        receive: Callable[[Tensor, int], Request],
    ) -> None:
        self.rank = rank
        self.size = size
        self._send = send
        self._receive = receive

    def send(self, dest: int, part: Part) -> Request:
        """Start to send."""
        return self._send(_buffer(part), dest)

    def receive(self, source: int, part: Part) -> Request:
        """Post a receive."""
        return self._receive(_buffer(part), source)


def _buffer(part: Part) -> Tensor:
    data, nbytes = part
    if data is not None:
        return data
    return torch.empty(nbytes, dtype=torch.uint8, device="meta" if nbytes else "cpu")


class Stepper:
    """Takes the steps of a collective as the messages of each have ended.

    Where a rank is lost it stands still: the group comes apart.

    Args:
        steps: of the collective.
        when_done: has an action called when a request has ended.
        finish: called at the end.
    """

    def __init__(
        self,
        steps: Steps,
        when_done: Callable[[Request, Callable[[], None]], None],
        finish: Callable[[], None],
    ) -> None:
        self._steps = steps
        self._when_done = when_done
        self._finish = finish
        self._missing = 0

    def advance(self) -> None:
        """Go on as far as nothing is awaited."""
        for requests in self._steps:
            pending = [request for request in requests if not request.done]
            if any(request.failed is not None for request in requests):
                return
            if pending:
                self._missing = len(pending)
                for request in pending:
                    self._when_done(request, self._one_has_ended)
                return
        self._finish()

    def _one_has_ended(self) -> None:
        self._missing -= 1
        if not self._missing:
            self.advance()
