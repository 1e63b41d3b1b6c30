"""A transport that damages messages: one bit of a copy is flipped in transit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from aladdin_mpi.control.refusals import Reason, Refusal, report
from aladdin_mpi.control.tags import SEALED
from aladdin_mpi.transport.base import Event, Request, Transport, as_tensor
from aladdin_mpi.transport.checksums import ChecksumTransport
from aladdin_mpi.transport.wrapper import TransportWrapper

Choice = Callable[[int, Tensor], bool]
"""Whether to damage a message, by its index among the rank's headers or other messages."""


class DamagingTransport(TransportWrapper):
    """Damages sent messages selected by ``chosen``; ``damaged`` lists their tags in order."""

    def __init__(
        self, inner: Transport, chosen: Choice, damage: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__(inner)
        self._chosen = chosen
        self._damage = damage or changed
        self._numbers = {True: 0, False: 0}
        self.damaged: list[int] = []

    def isend(
        self,
        buffer: Tensor | Sequence[float],
        dest: int,
        tag: int,
        after: Event | None = None,
    ) -> Request:
        buffer = as_tensor(buffer)
        if tag in SEALED and buffer.numel():
            kind = is_values(buffer)
            self._numbers[kind] += 1
            if self._chosen(self._numbers[kind], buffer):
                self.damaged.append(tag)
                buffer = self._damage(buffer)
        return self.inner.isend(buffer, dest, tag, after)


def changed(buffer: Tensor) -> Tensor:
    """Return a copy in which the highest exponent bit of the last value is flipped."""
    copy = buffer.clone()
    copy.view(torch.uint8)[-1] ^= 0x40
    return copy


def sealed(transport: Transport) -> Transport:
    """Return the transport with checksums, as ``--checksum`` does."""

    def damaged(source: int, tag: int) -> None:
        report(transport, Refusal(Reason.CHECKSUM, source, value=tag))

    return ChecksumTransport(transport, SEALED, damaged)


def is_values(buffer: Tensor) -> bool:
    """Return whether a message has values; headers are in float64."""
    return buffer.dtype != torch.float64
