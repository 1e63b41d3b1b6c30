"""Sums by messages around a ring of ranks, as :mod:`~aladdin_mpi.transport.collectives` has it.

The ring leaves each host once, however many ranks are there, and takes the time that its bytes need
between hosts. Open MPI's own all-reduce goes by the ranks' numbers: over TCP it took 2.2 times as
long with five ranks on as many hosts, 1.7 times with eight on four, and 1.05 times with four on
four (`benchmarks.allreduce --hosts`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from aladdin_mpi.allreduce.base import AllReduce, Pending
from aladdin_mpi.allreduce.buffers import Buffers
from aladdin_mpi.allreduce.over_transport import describe
from aladdin_mpi.errors import PeerFailedError
from aladdin_mpi.transport import collectives
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.group_collectives import Channel, Stepper
from aladdin_mpi.transport.request import Event

FIRST_TAG = 10_000
TAGS = 5_000
"""A bucket's messages have a tag of their own, so that the sums of several go on side by side."""
GENERATIONS = 4
"""Of tags: see `RingAllReduce`."""


class RingAllReduce(AllReduce):
    """Sums in ``dtype``, in the memory that is sent: on the CPU in the gradient's own.

    Every sum is added up in one place and copied from there, so that all ranks get the same bits.

    Args:
        transport: among whose ranks is summed.
        device: where the gradients live.
        dtype: of what is sent and added.
        generation: another one than those before whose messages may still be under way.
    """

    name = "ring"

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        dtype: torch.dtype,
        generation: int = 0,
    ) -> None:
        self._transport = transport
        self._first_tag = FIRST_TAG + generation % GENERATIONS * TAGS
        self._buffers = Buffers(dtype, device, transport.needs_memory)
        self.in_order = collectives.HostByHost(transport.hosts)
        self._under_way: list[_Sum] = []
        self._dead: int | None = None

    def start(self, values: Tensor, key: int) -> Pending:
        """See :meth:`AllReduce.start`."""
        self._check()
        buffer, event = self._buffers.load(values, key)
        tag = self._first_tag + key % TAGS
        pending = _Sum(self, self._transport, values, buffer, tag, event)
        self._under_way.append(pending)
        pending.begin()
        return pending

    def finish(self, pending: _Sum) -> None:
        """Wait for one sum."""
        while not pending.steps.has_ended:
            pending.wait_for_step()
            self._check()
        self._under_way.remove(pending)
        Buffers.store(pending.buffer, pending.values)

    def abandon(self, dead: int) -> None:
        """See :meth:`AllReduce.abandon`."""
        self._dead = dead
        for pending in list(self._under_way):
            pending.steps.abandon()

    def _check(self) -> None:
        if self._dead is not None:
            self.abandon(self._dead)
            raise PeerFailedError(self._dead, "")

    def describe(self) -> str:
        """See :meth:`AllReduce.describe`."""
        return describe(self._transport, f"messages around a ring, added in {self._buffers.name}")


class _Sum(Pending):
    """One sum: as soon as a step's messages have ended, by whichever thread, the next begins."""

    def __init__(
        self,
        owner: RingAllReduce,
        transport: Transport,
        values: Tensor,
        buffer: Tensor,
        tag: int,
        event: Event | None,
    ) -> None:
        self.values = values
        self.buffer = buffer
        self._owner = owner
        self._transport = transport
        self._event = event
        channel = Channel(
            transport.rank,
            transport.size,
            lambda part, dest: transport.isend(part, dest, tag),
            lambda part, source: transport.irecv(part, source, tag),
        )
        self.steps = Stepper(collectives.allreduce(owner.in_order(channel), buffer), transport)

    def begin(self) -> None:
        """Once the values have come from the device."""
        if self._event is None:
            self.steps.advance()
        else:
            self._transport.when_happened(self._event, self.steps.advance)

    def wait_for_step(self) -> None:
        """Wait for what is awaited at present, and go on."""
        if self._event is not None:
            self._transport.await_event(self._event)
        self._transport.wait_all(self.steps.awaited)
        self.steps.advance()

    def wait(self) -> Tensor:
        self._owner.finish(self)
        return self.values
