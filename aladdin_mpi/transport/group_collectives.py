"""Collectives of a group that is not all ranks of the job: over its messages, on any engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.collectives import Part, Steps
from aladdin_mpi.transport.request import Request

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
    """Takes the steps of a collective as the messages of each have ended, by whichever thread.

    Where a rank is lost it stands still.

    Args:
        steps: of the collective.
        transport: that its messages go by.
        finish: called at the end.
    """

    def __init__(
        self, steps: Steps, transport: Transport, finish: Callable[[], None] = lambda: None
    ) -> None:
        self._steps = steps
        self._transport = transport
        self._finish = finish
        self.awaited: Sequence[Request] = ()
        """The messages of the present step."""
        self.has_ended = False
        self._is_abandoned = False

    def abandon(self) -> None:
        """Go no further, and wait for nothing more."""
        self._is_abandoned = True
        for request in self.awaited:
            self._transport.abandon(request)

    def advance(self) -> None:
        """Go on as far as nothing is awaited."""
        with self._transport.atomic():
            while self._can_go_on:
                step = next(self._steps, None)
                if step is None:
                    self.has_ended = True
                    self._finish()
                    return
                self.awaited = step
                for request in step:
                    if not request.done:
                        self._transport.when_done(request, self.advance)

    @property
    def _can_go_on(self) -> bool:
        is_over = self.has_ended or self._is_abandoned
        return not is_over and all(each.done and each.failed is None for each in self.awaited)
