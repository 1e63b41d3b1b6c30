"""What a step has come to, its loss and whether its gradient was finite, read without a stall.

A device knows both when it has computed the step. To ask it at once would keep the host from giving
it the next one. So the numbers are sent to the host as the last part of the step, and read when
the next one has been given out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from aladdin_mpi.accelerator import CopyStream, is_accelerator
from aladdin_mpi.control.budget import Ticket
from aladdin_mpi.control.refusals import Found, GradientCheck, found_in
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.request import Event


class Outcome(NamedTuple):
    """Of the step of ``ticket``: ``found`` is what its gradient is refused for."""

    ticket: Ticket
    loss: float | None
    found: Found | None


class _Coming(NamedTuple):
    """Numbers that are on their way from a device: sums of buckets, then perhaps the loss."""

    numbers: Tensor
    event: Event
    buckets: list[int]

    def read(self, outcome: Outcome) -> Outcome:
        sums, rest = self.numbers.tolist(), len(self.buckets)
        loss = sums[rest] if len(sums) > rest else outcome.loss
        found = outcome.found or found_in(sums[:rest], self.buckets)
        return outcome._replace(loss=loss, found=found)


class Outcomes:
    """Those of a worker's steps, in order.

    Args:
        device: what computes.
    """

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self._transport = transport
        self._copies = CopyStream(device) if is_accelerator(device) else None
        self._unread: deque[tuple[Outcome, _Coming | None]] = deque()
        self.lag = 0 if self._copies is None else 1
        """Steps whose outcome may still be coming when the next one has been given out."""

    def __len__(self) -> int:
        """How many have not been read."""
        return len(self._unread)

    def note(self, ticket: Ticket, loss: float | Tensor | None, check: GradientCheck) -> None:
        """A step has been computed, or given to the device."""
        there = list(check.sums)
        known: float | None = None
        if not isinstance(loss, torch.Tensor):
            known = loss
        elif self._copies is None:
            known = loss.item()  # of another device than the model's
        else:
            there.append(loss)
        coming = self._send(there, check.buckets) if there else None
        self._unread.append((Outcome(ticket, known, check.found), coming))

    def _send(self, there: list[Tensor], buckets: list[int]) -> _Coming:
        assert self._copies is not None
        numbers = torch.stack([each.detach().float().reshape(()) for each in there])
        room = torch.empty(len(there), pin_memory=True)
        return _Coming(room, self._copies.copy(numbers, room), buckets)

    def read(self, lag: int = 0) -> Iterator[Outcome]:
        """All but the newest ``lag``, oldest first; waits for what is still coming."""
        while len(self._unread) > lag:
            outcome, coming = self._unread.popleft()
            if coming is not None:
                self._transport.await_event(coming.event)
                outcome = coming.read(outcome)
            yield outcome
