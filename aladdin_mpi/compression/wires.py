"""The choices of ``--wire``."""

from __future__ import annotations

import torch

from aladdin_mpi.compression.codec import DenseWire, GradientCodec
from aladdin_mpi.compression.few_bits import FewBitsCodec
from aladdin_mpi.model.layout import Layout
from aladdin_mpi.model.vectors import full
from aladdin_mpi.options.general import FEW_BITS


def bits_of(name: str) -> tuple[int, ...]:
    """Of a value, from generous to thrifty, between which a ``--wire`` leaves the choice."""
    if name == "auto":
        return tuple(sorted(FEW_BITS.values(), reverse=True))
    return (FEW_BITS.get(name, 8 * _dtype(name).itemsize),)


def _dtype(name: str) -> torch.dtype:
    return torch.bfloat16 if name == "bf16" else torch.float32


def make_codec(
    name: str,
    layout: Layout,
    device: torch.device,
    moves_bytes: bool = True,
    dtype: torch.dtype | None = None,
) -> GradientCodec:
    """The codec of a ``--wire``.

    Args:
        name: fp32, which does not round models in float64 either, bf16 or one of ``FEW_BITS``.
        layout: of the flat vector.
        device: where the vectors live.
        moves_bytes: see :class:`DenseWire`.
        dtype: of the flat vector; None: float32.
    """
    on_wire = _dtype(name)
    if name == "fp32" and dtype is not None:
        on_wire = full(dtype)
    wire = DenseWire(on_wire, device, moves_bytes)
    return FewBitsCodec(wire, layout, FEW_BITS[name]) if name in FEW_BITS else wire
