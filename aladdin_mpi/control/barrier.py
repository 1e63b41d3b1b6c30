"""A barrier of the ranks that live."""

from __future__ import annotations

import torch

from aladdin_mpi.control.tags import Tag
from aladdin_mpi.transport.base import Transport


def barrier(transport: Transport) -> None:
    """Wait until every rank that lives has come here.

    Raises:
        PeerFailedError: rank 0 has failed.
    """
    if not transport.survives:
        transport.wait(transport.ibarrier())
    elif transport.rank:
        transport.isend(_nothing(), 0, Tag.BARRIER)
        transport.wait(transport.irecv(_nothing(), 0, Tag.BARRIER))
    else:
        _wait_for_all(transport)


def _wait_for_all(transport: Transport) -> None:
    others = transport.living[1:]
    transport.wait_ended([transport.irecv(_nothing(), rank, Tag.BARRIER) for rank in others])
    for rank in others:
        transport.isend(_nothing(), rank, Tag.BARRIER)


def _nothing() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)
