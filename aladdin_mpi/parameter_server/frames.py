"""The messages between workers and servers: a small header, then the buckets it announces."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from math import isnan
from typing import NamedTuple

import torch
from torch import Tensor

from aladdin_mpi.transport.request import Request, numbers_of
from aladdin_mpi.transport.sealed import intact

MOST_NOTES = 8
"""The largest number of notes in a header, unless a server expects more."""


class Kind(IntEnum):
    """What follows a header."""

    BUCKETS = 1
    END = 2


class Header(NamedTuple):
    """Announces buckets, or the end of what its sender has to say.

    Gradients: ``gradients`` gradients summed into one, computed from sample number
    ``samples`` of the run on, with the weight ``alpha`` in their round. Models: ``bucket``
    follows, to be blended in by ``alpha``. ``notes`` are what an algorithm adds, ``MOST_NOTES``
    numbers as a rule.
    """

    kind: int
    gradients: int = 0
    samples: int = 0
    bucket: int = -1
    alpha: float = 0.0
    notes: tuple[float, ...] = ()

    def pack(self) -> tuple[float, ...]:
        """As the numbers of a message."""
        return (*self[:-1], *self.notes)

    @staticmethod
    def unpack(numbers: Sequence[float]) -> Header:
        """The inverse of :meth:`pack`."""
        kind, gradients, samples, bucket, alpha, *notes = numbers
        return Header(int(kind), int(gradients), int(samples), int(bucket), alpha, tuple(notes))

    @staticmethod
    def received(request: Request) -> Header:
        """What a completed receive into a :func:`new_header` has brought.

        Raises:
            TransportError: it was damaged on its way.
        """
        numbers = numbers_of(request)
        if isnan(numbers[0]):  # as all numbers of a void message are
            assert request.buffer is not None
            intact(request.buffer[: len(numbers)], request.source)
        return Header.unpack(numbers)


def new_header(notes: int = 0) -> Tensor:
    """A buffer to receive a header in that may have so many notes."""
    return torch.empty(len(Header._fields) - 1 + max(notes, MOST_NOTES), dtype=torch.float64)
