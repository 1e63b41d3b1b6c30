"""A signal at any rank ends the run after the steps under way, to be resumed later."""

from __future__ import annotations

import torch

from aladdin_mpi.control.tags import COORDINATOR, Tag
from aladdin_mpi.process import stop_signal
from aladdin_mpi.run.coordinator import Coordinator
from aladdin_mpi.transport.base import Transport


class Suspension:
    """Tells the coordinator of a signal that has come to this rank.

    The transport looks for it, whether the rank computes, serves or waits.

    Args:
        coordinator: at rank 0.
    """

    def __init__(self, transport: Transport, coordinator: Coordinator | None) -> None:
        self._transport = transport
        self._coordinator = coordinator
        self._told = False
        if transport.shares_process:
            return
        stop_signal.install()
        if coordinator is not None:
            suspend = coordinator.suspend
            transport.on_message(
                Tag.SUSPEND, 8, lambda _, message: suspend(int(message.view(torch.int64)))
            )
        transport.watch(self._look)

    def close(self) -> None:
        """The run is over: signals change nothing any more."""
        self._transport.unwatch(self._look)

    def _look(self) -> None:
        number = stop_signal.received()
        if number is None or self._told:
            return
        self._told = True
        if self._coordinator is not None:
            self._coordinator.suspend(number)
        else:
            self._transport.isend(torch.tensor([int(number)]), COORDINATOR, Tag.SUSPEND)
