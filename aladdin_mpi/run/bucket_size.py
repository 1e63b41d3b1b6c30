"""Size of messages where the user leaves it open: larger where workers have GPUs."""

from __future__ import annotations

from typing import TypeVar

import torch

from aladdin_mpi.accelerator import is_accelerator
from aladdin_mpi.control.exchange import broadcast, gather
from aladdin_mpi.options.run import RunOptions
from aladdin_mpi.transport.base import Transport

GPU_BUCKET_MB = 16.0
"""Each bucket costs the host time in Python: with 24 of 4 MB a GPU waited for it (docs/gpus.md)."""
Options = TypeVar("Options", bound=RunOptions)


def with_bucket_size(transport: Transport, options: Options, device: torch.device) -> Options:
    """Return ``options`` with the largest message for the devices of all ranks.

    All ranks call it. In virtual time, whose workers need not be this machine's, nothing changes.

    Args:
        transport: among all ranks.
        options: of the run; a size that the user has given stays.
        device: this rank's.
    """
    if transport.models_time or "bucket_mb" in options.model_fields_set:
        return options
    if broadcast(transport, any(gather(transport, is_accelerator(device)))):
        return options.model_copy(update={"bucket_mb": GPU_BUCKET_MB})
    return options
