"""Signals on which the run saves its state and ends."""

from __future__ import annotations

import signal

import torch
from torch import Tensor

from aladdin_mpi.control.tags import COORDINATOR, Tag
from aladdin_mpi.process import guard
from aladdin_mpi.session.coordinator import Coordinator, RunEnd, RunHook
from aladdin_mpi.transport.base import Transport


class Suspension(RunHook):
    """A hook that reports a signal received by this rank to the coordinator.

    The transport polls for it while the rank computes, serves or waits.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._run: Coordinator | None = None
        self._number = 0
        self._polls = transport.poll_hooks
        if self._polls is None:
            return
        guard.note_suspend_signals()
        if transport.rank == COORDINATOR:
            transport.on_message(Tag.SUSPEND, 8, self._take)
        self._polls.watch(self._poll)

    def on_begin(self, run: Coordinator) -> None:
        """Suspend the run at rank 0 on signals received so far, and from now on."""
        self._run = run
        if self._number:
            run.suspend(_name(self._number))

    def on_end(self, ending: RunEnd) -> None:
        """Ignore signals from now on."""
        if self._polls is not None:
            self._polls.unwatch(self._poll)

    def _poll(self) -> None:
        number = guard.suspend_signal()
        if number is None or self._number:
            return
        if self._transport.rank == COORDINATOR:
            self._suspend(number)
        else:
            self._number = number
            self._transport.isend(torch.tensor([int(number)]), COORDINATOR, Tag.SUSPEND)

    def _take(self, source: int, message: Tensor) -> None:
        self._suspend(int(message.view(torch.int64)))

    def _suspend(self, number: int) -> None:
        self._number = self._number or number
        if self._run is not None:
            self._run.suspend(_name(number))


def _name(number: int) -> str:
    return signal.Signals(number).name
