"""The messages between workers and servers: a small header, then the buckets it announces."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor


class Kind(IntEnum):
    """What follows a header."""

    BUCKETS = 1
    END = 2


class Header(NamedTuple):
    """Announces buckets, or the end of what its sender has to say.

    Gradients: ``gradients`` gradients summed into one, computed from sample number
    ``samples`` of the run on. Models: ``bucket`` follows, to be blended in by
    ``alpha``.
    """

    kind: int
    gradients: int = 0
    samples: int = 0
    bucket: int = -1
    alpha: float = 0.0

    def pack(self) -> Tensor:
        """As a message of ``HEADER_BYTES``."""
        return torch.tensor(self, dtype=torch.float64)

    @staticmethod
    def unpack(message: Tensor) -> Header:
        """The inverse of :meth:`pack`."""
        kind, gradients, samples, bucket, alpha = message.tolist()
        return Header(int(kind), int(gradients), int(samples), int(bucket), alpha)


def new_header() -> Tensor:
    """A buffer to receive a header in."""
    return torch.empty(len(Header._fields), dtype=torch.float64)
