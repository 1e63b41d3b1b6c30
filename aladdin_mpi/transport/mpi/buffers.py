"""Tensors as MPI takes them."""

from __future__ import annotations

from mpi4py import MPI  # before torch: Cray MPICH breaks the other way round

# isort: split
import torch
from torch import Tensor

from aladdin_mpi.errors import TransportError


def check_buffer(buffer: Tensor) -> None:
    """Whether MPI can take it.

    Raises:
        TransportError: it is not contiguous, or not in the CPU's memory.
    """
    if not buffer.is_contiguous() or buffer.device.type != "cpu":
        raise TransportError(
            f"MPI sends contiguous CPU tensors; got shape {tuple(buffer.shape)} with strides "
            f"{buffer.stride()} on {buffer.device}"
        )


def in_bytes(buffer: Tensor) -> list[object]:
    """``buffer`` as MPI takes it: its own memory, counted in bytes."""
    check_buffer(buffer)
    return [buffer.detach().reshape(-1).view(torch.uint8).numpy(), MPI.BYTE]
