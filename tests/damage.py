"""A network that damages messages: one bit of a copy is changed on the way."""

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
"""Whether to damage a message, by its number among the rank's headers, or its others."""


class DamagingTransport(TransportWrapper):
    """Damages what it sends, if ``chosen``; ``damaged`` has the tags, in order."""

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
    """A copy; the highest bit of the last value's exponent is the other way round."""
    copy = buffer.clone()
    copy.view(torch.uint8)[-1] ^= 0x40
    return copy


def sealed(transport: Transport) -> Transport:
    """With checksums, as ``--checksum`` has it."""

    def damaged(source: int, tag: int) -> None:
        report(transport, Refusal(Reason.CHECKSUM, source, value=tag))

    return ChecksumTransport(transport, SEALED, damaged)


def is_values(buffer: Tensor) -> bool:
    """Headers are in float64."""
    return buffer.dtype != torch.float64
